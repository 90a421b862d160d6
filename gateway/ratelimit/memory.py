"""Limits of one process, kept in memory.

All buckets are full when the process starts. A restart does not refill a budget, because the ledger
knows the spending (budgets.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llmops.gateway.ratelimit.backend import Limiter, ReserveResult, make_reserve_result
from llmops.gateway.ratelimit.buckets import (
    MINUTE,
    BucketState,
    Limit,
    LimitRequest,
    Remaining,
    Settlement,
    advance_bucket,
    decide,
)

#: Maximum number of records. Beyond it, records of full buckets are dropped, which loses nothing: a
#: missing record means a full bucket.
MAX_RECORDS = 10_000


class InMemoryLimiter(Limiter):
    """A limiter that reserves in memory without waiting. Use it from one event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, BucketState] = {}
        # Slots and money that open requests hold, by the name of their limit.
        self._held: dict[str, tuple[int, int]] = {}

    async def reserve(self, bounds: Sequence[Limit], asks: Sequence[LimitRequest]) -> ReserveResult:
        return self.reserve_now(bounds, asks)

    def reserve_now(self, bounds: Sequence[Limit], asks: Sequence[LimitRequest]) -> ReserveResult:
        """Reserve the amounts `asks`, one for each limit of `bounds`, or nothing."""
        now = self._clock()
        records = [self._record(bound, now) for bound in bounds]
        decision = decide(bounds, asks, [self._left(*each) for each in zip(bounds, records, strict=True)])
        if decision.lacking is None:
            money = decision.money
            for bound, ask, record, left in zip(bounds, asks, records, decision.left, strict=True):
                stamp, _, _, spent, period = record
                self._records[bound.name] = stamp, left[0], left[1], spent, period
                self.hold(bound, ask.places, money)
            if len(self._records) > MAX_RECORDS:
                self._forget(now)
        return make_reserve_result((decision, bounds, self))

    def settle(self, bounds: Sequence[Limit], change: Settlement) -> None:
        now = self._clock()
        for bound in bounds:
            stamp, requests, tokens, spent, period = self._record(bound, now)
            requests = min(requests - change.requests, bound.requests)
            tokens = min(tokens - change.tokens, bound.tokens)
            self._records[bound.name] = stamp, requests, tokens, spent + change.spent, period
            self.hold(bound, change.places, change.money)

    def spent(self, bound: Limit, at_least: int) -> None:
        stamp, requests, tokens, spent, period = self._record(bound, self._clock())
        if period == bound.period:
            self._records[bound.name] = stamp, requests, tokens, max(spent, at_least), period

    def reset_rates(self) -> None:
        """Drop all records. Slots and money of open requests stay held until they are settled."""
        self._records.clear()

    def _record(self, bound: Limit, now: float) -> BucketState:
        kept = self._records.get(bound.name)
        return advance_bucket(kept, bound, now) if kept else (now, bound.requests, bound.tokens, 0.0, bound.period)

    def _left(self, bound: Limit, record: BucketState) -> Remaining:
        _, requests, tokens, spent, _ = record
        places, money = self._held.get(bound.name, (0, 0))
        return requests, tokens, bound.places - places, bound.money - spent - money

    def hold(self, bound: Limit, places: int, money: int) -> None:
        """Hold slots and micro-dollars of a limit for open requests; negative numbers free them."""
        if bound.holds and (places or money):
            before = self._held.get(bound.name, (0, 0))
            after = max(before[0] + places, 0), max(before[1] + money, 0)
            if any(after):
                self._held[bound.name] = after
            else:
                self._held.pop(bound.name, None)

    def held_money(self, name: str) -> int:
        """Return the micro-dollars of a limit that open requests hold."""
        return self._held.get(name, (0, 0))[1]

    def _forget(self, now: float) -> None:
        """Drop the records of full buckets without a budget.

        A bucket that is not in debt is full again a minute after its last change. A bucket in debt
        takes longer to fill.
        """
        self._records = {
            name: record
            for name, record in self._records.items()
            if record[0] > now - MINUTE or record[3] or min(record[1], record[2]) < 0
        }
