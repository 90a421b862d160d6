"""Reservations of quota, made when a request starts and settled with its real usage when it ends."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from math import inf
from time import monotonic

from llmops.clocks import utc_now
from llmops.gateway.errors import RateLimitError
from llmops.gateway.interfaces import Outcome, Quota, QuotaReservation, Usage
from llmops.gateway.ratelimit.backend import Limiter, ReserveResult, make_reserve_result
from llmops.gateway.ratelimit.buckets import MINUTE, Limit, LimitRequest, Settlement, make_decision, make_settlement
from llmops.gateway.ratelimit.budgets import Budgets, CostSource, Tariff
from llmops.gateway.ratelimit.headers import openai_headers, tightest_levels
from llmops.gateway.ratelimit.limit_errors import (
    budget_exhausted,
    budget_part_exhausted,
    rate_exceeded,
    request_exceeds_limit,
    too_many_open_requests,
)
from llmops.gateway.ratelimit.output_length import OutputLengthEstimate
from llmops.gateway.ratelimit.quotas import ENTRY_REQUEST, CallerLimits, ModelLimits

#: Seconds between two updates of reservations whose answers grow, and between two renewals of the
#: lease: far below `LEASE_TIMEOUT`.
GROWTH_INTERVAL = 0.5
#: Finish reasons of complete answers. Only their lengths are used for the estimate.
_NATURAL_FINISH_REASONS = frozenset({"stop", "tool_calls"})
_ENTRY_DIMENSIONS = frozenset({"requests", "places"})


class RateLimits:
    """The rate limits and budgets of this process, with all open reservations."""

    def __init__(
        self,
        limiter: Limiter,
        costs: CostSource | None = None,
        clock: Callable[[], float] = monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Create the limits.

        Args:
            limiter: The store of limits.
            costs: The prices and the spending of callers; without it, budgets are not enforced.
            clock: Returns the time in seconds, for waits.
            now: Returns the date and time, for budget periods.
        """
        self.limiter, self.clock, self.now = limiter, clock, now
        self.budgets = Budgets(limiter, costs, now, clock) if costs is not None else None
        self.expected = OutputLengthEstimate()
        # `waiting` is the number of postponed entries that no reservation has covered. `settled` is
        # the number of these entries whose request has ended. A level that was read from the
        # limiter does not include entries that ended after the read.
        self.waiting = self.settled = 0
        self.open: set[Reservation] = set()
        # Tokens to charge to a limit, and the tokens per minute to charge, by the limiter and the
        # names of the narrower limit and of this limit (`ModelLimits.paces`).
        self._postponed: dict[tuple[Limiter, str, str], tuple[Limit, float, float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def new_reservation(self, plan: CallerLimits, arrived: datetime | None = None) -> Reservation:
        """Create the reservation of a request that arrived at the time `arrived`; None means now."""
        return Reservation(self, plan, arrived or self.now())

    def watch(self, reservation: Reservation) -> None:
        """Update the reservation while its answer grows, and keep renewing the lease."""
        self.open.add(reservation)
        self._start_timer()

    def charge(self, part: ReservedAmounts, tokens: float, paces: Mapping[str, tuple[str, float]]) -> None:
        """Charge `tokens` beyond the reservation `part`: at once, or at the pace in `paces`.

        A caller in debt therefore takes from a limit that others share no faster than its own limit
        is refilled.
        """
        for bound in part.bounds:
            if bound.name not in paces:
                part.by.settle((bound,), Settlement(tokens=tokens))
                continue
            narrower, pace = paces[bound.name]
            key = part.by, narrower, bound.name
            before = self._postponed.get(key, (bound, pace, 0.0))[2]
            self._postponed[key] = bound, pace, before + tokens
            self._start_timer()

    def charge_postponed(self, seconds: float) -> None:
        """Charge the tokens that are due in `seconds` seconds at the pace of each limit.

        The pace is not divided by the gateways, because a client may stay with one of them.
        """
        for key, (bound, pace, tokens) in list(self._postponed.items()):
            due = min(tokens, pace * seconds / MINUTE)
            key[0].settle((bound,), Settlement(tokens=due))
            if due < tokens:
                self._postponed[key] = bound, pace, tokens - due
            else:
                del self._postponed[key]

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.budgets is not None:
            await self.budgets.close()
        await self.limiter.close()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GROWTH_INTERVAL, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self.open or self._postponed:
            self._start_timer()
        for reservation in self.open:
            reservation.extend()
        self.charge_postponed(GROWTH_INTERVAL)
        self.limiter.beat()


class ReservedAmounts:
    """The amounts that a request has reserved at one limiter in each of `bounds`.

    Attributes:
        by: The limiter, where the amounts must be settled.
        bounds: The limits.
        tokens: Tokens in each limit; None if the reservation was made before the prompt was
            counted.
        places: Slots in each limit.
        money: Micro-dollars in each limit.
    """

    def __init__(self, reserved: ReserveResult, bounds: Sequence[Limit], ask: LimitRequest, tokens: int | None) -> None:
        self.by, self.bounds, self.tokens = reserved.by, bounds, tokens
        self.places, self.money = ask.places, reserved.decision.money


class Reservation(QuotaReservation):
    """The reservation of one request in all of its caller's quotas.

    Call `enter`, then `tokens` as soon as the prompt is counted, then `close`, however the request
    ended.
    """

    def __init__(self, limits: RateLimits, plan: CallerLimits, arrived: datetime) -> None:
        self._limits, self._plan, self._arrived = limits, plan, arrived
        self._reserved: list[ReservedAmounts] = []
        # Last result of the limiter, for the response headers.
        self._latest: ReserveResult | None = None
        # True while the request and its slot are not reserved. A request that ends in this state is
        # still charged as one request.
        self._owes_entry = False
        self._usage: Callable[[], Usage] | None = None
        # Tariff that the money was reserved by; the settlement uses the same tariff.
        self._tariff: Tariff | None = None
        self._model, self._answers, self._bounded = "", 1, True
        self._closed = self._handed_over = self._keeps_money = False

    @property
    def reserved_tokens(self) -> int:
        return max((part.tokens for part in self._reserved if part.tokens is not None), default=0)

    async def enter(self) -> None:
        """Reserve one request and one slot.

        If many requests and slots are left in the caller's limits, both are reserved later, in one
        step with the tokens.

        Raises:
            RateLimitError: A limit is reached.
        """
        limits, plan = self._limits, self._plan
        if plan.room > limits.waiting:
            limits.waiting += 1
            self._owes_entry = True
            return
        bounds, asks = plan.before, (ENTRY_REQUEST,) * len(plan.before.all)
        reserved = await self._reserve(bounds, asks)
        self._reserved.append(ReservedAmounts(reserved, reserved.bounds, ENTRY_REQUEST, None))

    async def tokens(
        self,
        model: str,
        prompt: int,
        most: int = 0,
        answers: int = 1,
        bounded: bool = True,
        known: int | None = None,
    ) -> int:
        self._model, self._answers, self._bounded = model, answers, bounded
        bounds, entered = self._plan.of(model), not self._owes_entry
        if not bounds.all or (entered and not bounds.more and known is None) or not (prompt or most or bounds.own):
            return most
        amount = self._amount(bounds, prompt, most) if known is None else known
        money = least = 0
        if (prompt or most) and self._plan.budgets and self._limits.budgets is not None:
            self._tariff = tariff = self._limits.budgets.tariff(model, self._arrived) if model else _unpriced
            # Costs of the longest and of the shortest possible answer.
            money, least = tariff(prompt, 0, most), tariff(prompt, 0, min(most, answers))
            if money:
                await self._read_spending(self._limits.budgets)
        if known is not None:
            # No limit rejects an answer that is taken over, because the hold of its lost gateway
            # may still count.
            hold, limiter = LimitRequest(places=1), self._limits.limiter
            limiter.settle(bounds.all, Settlement(places=1, money=money))
            held = make_reserve_result((make_decision(((), money, None, "", 0.0)), bounds.all, limiter))
            self._reserved.append(ReservedAmounts(held, bounds.all, hold, known))
            self._limits.watch(self)
            return most
        asks = bounds.asks(amount, money, least, entered)
        reserved = await self._reserve(bounds, asks)
        if not entered or not bounds.own:
            self._reserved.append(ReservedAmounts(reserved, reserved.bounds, asks[0], amount if model else 0))
        else:
            plain = len(bounds.plain)
            self._reserved.append(ReservedAmounts(reserved, reserved.bounds[:plain], asks[0], amount))
            self._reserved.append(ReservedAmounts(reserved, reserved.bounds[plain:], asks[-1], amount))
        given = reserved.decision.money
        return most if given == money else self._affordable(given, prompt, most)

    def follow(self, usage: Callable[[], Usage]) -> None:
        self._usage = usage
        if not self._bounded:
            self._limits.watch(self)

    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        seen = self._latest
        if seen is None or not seen.bounds:
            return ()
        return openai_headers(tightest_levels(seen.bounds, seen.decision.left))

    def extend(self) -> None:
        """Settle the tokens beyond the reservation now instead of at the end of the answer."""
        if self._usage is None or self._bounded:
            return
        total = _total_tokens(self._usage())
        for part in self._reserved:
            if part.tokens is not None and total > part.tokens:
                self._limits.charge(part, total - part.tokens, self._plan.of(self._model).paces)
                part.tokens = total

    def hand_over(self, is_taken: bool = True) -> None:
        self._handed_over, self._keeps_money = True, not is_taken

    def close(self, outcome: Outcome) -> None:
        if self._closed:
            return
        self._closed, self._usage = True, None
        limits, usage = self._limits, outcome.usage
        limits.open.discard(self)
        if usage is not None and not self._bounded and outcome.finish in _NATURAL_FINISH_REASONS:
            limits.expected.note(self._model, usage.completion_tokens // self._answers, self._plan.owner)
        total = _total_tokens(usage) if usage is not None else 0
        # Tokens used by a request that never reserved tokens.
        unasked = total if total and not self._model else 0
        if self._owes_entry:
            limits.settled += 1
        if self._owes_entry or unasked:
            limits.limiter.settle(self._plan.before.all, Settlement(int(self._owes_entry), unasked))
        spent = self._spent(usage) if usage is not None and outcome.is_billed else 0
        for part in self._reserved:
            if part.tokens is not None:
                tokens = 0 if self._handed_over else total - part.tokens
                if tokens > 0:
                    limits.charge(part, tokens, self._plan.of(self._model).paces)
                    tokens = 0
                money = 0 if self._keeps_money else part.money
                change = make_settlement((0, tokens, -part.places, -money, spent))
                part.by.settle(part.bounds, change)
            elif self._plan.holds:
                part.by.settle(part.bounds, make_settlement((0, 0, -part.places, 0, 0)))

    # -- reserving

    async def _read_spending(self, budgets: Budgets) -> None:
        """Query the ledger for the caller's budgets if the last result is old or may be lost."""
        plan, generation = self._plan, self._limits.limiter.generation
        if plan.fresh <= self._limits.clock() or plan.generation != generation:
            plan.fresh = await budgets.known(plan.budgets)
            plan.generation = generation

    async def _reserve(self, bounds: ModelLimits, asks: Sequence[LimitRequest]) -> ReserveResult:
        limits, plan, settled = self._limits, self._plan, self._limits.settled
        while (reserved := await limits.limiter.reserve(bounds.all, asks)).decision.of == "loss":
            await asyncio.sleep(reserved.decision.wait)
            if plan.budgets and limits.budgets is not None:
                await self._read_spending(limits.budgets)
            settled = limits.settled
        self._latest, decision = reserved, reserved.decision
        # Postponed entries are settled at the usual limiter, so a fallback limiter's levels do not
        # allow requests to postpone more.
        plan.note(decision.left, limits.limiter.gateways if reserved.by is limits.limiter else inf, settled)
        # A request rejected for its size is still charged as one request; a request rejected for
        # the number of requests or slots is not.
        if self._owes_entry and (decision.lacking is None or decision.of in _ENTRY_DIMENSIONS):
            limits.waiting -= 1
            self._owes_entry = False
        if decision.lacking is not None:
            raise self._rejection(bounds.quotas[decision.lacking], asks[decision.lacking], reserved)
        if plan.holds:
            limits.watch(self)
        return reserved

    def _rejection(self, quota: Quota, ask: LimitRequest, reserved: ReserveResult) -> RateLimitError:
        """Return the error of a rejection."""
        left, _, lacking, of, wait = reserved.decision
        assert lacking is not None
        bound = reserved.bounds[lacking]
        if of == "money":
            if quota.budget is not None and bound.money < quota.budget.micros:
                return budget_part_exhausted(quota)
            return budget_exhausted(quota, self._limits.now())
        if of == "places":
            return too_many_open_requests(quota, bound.places, wait)
        if of == "requests":
            return rate_exceeded(quota, of, bound.requests, left[lacking][0], ask.requests, wait)
        return rate_exceeded(quota, of, bound.tokens, left[lacking][1], ask.tokens, wait)

    def _amount(self, bounds: ModelLimits, prompt: int, most: int) -> int:
        """Return the number of tokens to reserve for prompt and answers.

        A maximum length that the client set is reserved in full. Otherwise the estimated length of
        this model's answers to the caller is reserved, but no more than a full bucket holds.

        Args:
            bounds: The limits for the request's model.
            prompt: Tokens of the prompt.
            most: The maximum tokens of all answers together.

        Raises:
            TokenRateLimitError: The request has more tokens than a limit allows in a minute.
        """
        limit, bounded = bounds.tokens, self._bounded
        if prompt + (most if bounded else 0) > limit:
            assert bounds.smallest is not None
            raise request_exceeds_limit(bounds.smallest, prompt, most if bounded else 0)
        if bounded:
            return prompt + most
        expected = self._limits.expected.of(self._model, self._plan.owner) * self._answers
        return int(min(prompt + min(most, expected), limit))

    def _affordable(self, given: int, prompt: int, most: int) -> int:
        """Return the tokens of the longest answer that costs at most `given` micro-dollars.

        The result is at most `most`.
        """
        assert self._tariff is not None
        return bisect_right(_CostByLength(self._tariff, prompt, most), given) - 1

    # -- settling

    def _spent(self, usage: Usage) -> int:
        budgets, tariff = self._limits.budgets, self._tariff
        if budgets is None or tariff is None:
            return 0
        spent = tariff(usage.prompt_tokens, usage.cached_tokens or 0, usage.completion_tokens)
        budgets.settled(self._plan.budgets, spent)
        return spent


class _CostByLength(Sequence[int]):
    """The costs of all answer lengths, as a sequence for a binary search."""

    def __init__(self, tariff: Tariff, prompt: int, most: int) -> None:
        self._tariff, self._prompt, self._most = tariff, prompt, most

    def __len__(self) -> int:
        return self._most + 1

    def __getitem__(self, tokens: int) -> int:  # type: ignore[override]
        return self._tariff(self._prompt, 0, tokens)


def _unpriced(prompt: int, cached: int, answer: int) -> int:
    """Return the cost to reserve for a request without a model, in micro-dollars.

    A used-up budget rejects even this smallest cost. The settlement refunds the cost.
    """
    return 1


def _total_tokens(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens
