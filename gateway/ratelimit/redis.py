"""Limits that several gateways share, in Redis or Valkey.

While Redis is unavailable, each gateway enforces its share of the limits.

Reservations are decided by a script (reserve.lua). Only one call runs at a time: reservations and
settlements that arrive meanwhile are sent with the next call. When a call fails or takes longer
than `TIMEOUT`, this gateway decides alone, with its share of each limit, until Redis answers again.

Redis may come back empty, because it was restarted, flushed or replaced. Each call therefore
carries the known spending of the budgets in the call, and the script never goes below this
spending. A new `generation` makes budgets.py query the ledger again. For `LOSS_SILENCE` seconds no
slots and no money are granted, until each gateway has restored what it holds. A record counts as
lost, too, if it cannot be read or lacks slots or money that the calling gateway holds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic_core import to_json
from redis.exceptions import ResponseError

from llmops.background import TaskSet, cancel_tasks
from llmops.gateway.logging_setup import RepeatedLines
from llmops.gateway.ratelimit.backend import LEASE_TIMEOUT, Limiter, ReserveResult, make_reserve_result
from llmops.gateway.ratelimit.buckets import (
    MAX_CLOCK_STEP,
    MINUTE,
    NO_WAIT_HELPS,
    SLOT_RETRY_DELAY,
    TOLERANCE,
    UNLIMITED,
    Limit,
    LimitRequest,
    PendingSettlements,
    Settlement,
    add_settlement,
    make_decision,
    make_settlement,
)
from llmops.gateway.ratelimit.memory import InMemoryLimiter
from llmops.gateway.redis_client import FAILURES, connect, reconnect
from llmops.urls import without_secrets

log = logging.getLogger(__name__)

#: Prefix of all keys, with the version of the stored data: gateways of different versions have
#: separate limits.
PREFIX = "{llmops:limits:3}"
# Seconds after which a call of Redis counts as failed. The script takes less than a millisecond; a
# busy machine takes longer.
TIMEOUT = 0.25
# Maximum number of seconds for connecting to Redis, which delays the gateway's start.
CONNECT_TIMEOUT = 0.5
# Seconds between two attempts to reach an unavailable Redis.
RETRY_INTERVAL = 0.5
# Maximum number of seconds that settled usage waits for a reservation, to be sent in the same call.
SETTLE_INTERVAL = 0.5
# Maximum number of seconds that freed slots and money wait: short, because other requests may be
# rejected meanwhile.
RELEASE_INTERVAL = 0.05
# Seconds between two calls of an idle gateway. Each gateway must be counted while Redis answers, so
# that all divide the limits by the same number when Redis is unavailable. A gateway that has not
# called since another gateway started would grant more than its part.
SIGN_OF_LIFE_INTERVAL = 1.0
# Seconds after a loss of data until the script grants slots and money: all gateways call meanwhile.
LOSS_SILENCE = SIGN_OF_LIFE_INTERVAL + 2 * TIMEOUT
# Maximum number of limits that a sign of life checks for a loss of what this gateway holds of them.
MAX_CHECKED = 256
# Maximum number of reservations in one call, which then blocks Redis for less than a millisecond.
MAX_BATCH = 64
# Minimum seconds between two log lines about failures, and about lost data: a broken Redis may fail
# at every call.
LOG_INTERVAL = 60.0
# Share of a budget that all gateways together may grant without Redis between two queries of the
# ledger. A gateway that alone has lost Redis grants it beside all that the others grant there.
BUDGET_STEP = 0.1
# Maximum number of budgets remembered for an outage of Redis.
MAX_REMEMBERED = 10_000

_SCRIPT = Path(__file__).with_name("reserve.lua")

_Call = tuple[Sequence[Limit], Sequence[LimitRequest], "asyncio.Future[ReserveResult | None]"]

#: A decision as the script writes it: lacking (0 if granted), of, wait, money, and the amounts left
#: in each limit.
_Answer = tuple[
    Annotated[int, Field(ge=0)],
    str,
    FiniteFloat,
    FiniteFloat,
    list[tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]] | dict[str, Any],
]
#: The script's reply: gateways, epoch, the spending of each budget, and the decisions. Lua writes
#: an empty list as an empty object.
_REPLY: TypeAdapter[Any] = TypeAdapter(
    tuple[
        Annotated[int, Field(ge=1)],
        str,
        list[tuple[str, tuple[int, FiniteFloat]]] | dict[str, Any],
        list[_Answer] | dict[str, Any],
    ]
)


class RedisLimiter(Limiter):
    """A limiter that keeps its limits in the Redis at `url`."""

    def __init__(
        self,
        url: str,
        prefix: str = PREFIX,
        timeout: float = TIMEOUT,
        clock: Callable[[], float] | None = None,
        least_parts: int = 2,
    ) -> None:
        # A gateway that started within the last second, or while Redis was away, knows of no other
        # gateway: `least_parts` is the minimum number of parts into which it divides the limits then.
        self._least_parts = least_parts
        self._url, self._place, self._prefix = url, without_secrets(url), prefix
        # The client never retries a call, because a reservation would count twice.
        self._client = connect(url, timeout, CONNECT_TIMEOUT, single_connection_client=True)
        self._script = self._client.register_script(_SCRIPT.read_bytes())
        self._alone = _FallbackLimiter(self._carry, clock)
        self.up = asyncio.Event()
        self._process, self._gone, self._epoch = "", "", ""
        self._settled: PendingSettlements = {}
        # Slots and money that open requests of this process hold.
        self._held: PendingSettlements = {}
        # The period, and the spending in this period according to Redis or the ledger, by the name
        # of the limit.
        self._known: dict[str, tuple[int, int]] = {}
        # The same according to the ledger while Redis is unavailable. It is not sent to Redis, because
        # it includes what gateways spend meanwhile and settle later.
        self._ledger: dict[str, tuple[int, int]] = {}
        # The spending up to which this gateway may go while Redis is unavailable, by the name, period
        # and money of a budget.
        self._parts: dict[tuple[str, int, float], float] = {}
        # The same until the next query of the ledger, by the name of a budget.
        self._steps: dict[str, tuple[int, float]] = {}
        self._waiting: list[_Call] = []
        # Calls run one after another: each call reports what the process holds, which the previous
        # reply changes.
        self._calling = asyncio.Lock()
        self._sending: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flush_at = self._checked_at = 0.0
        self._connecting: asyncio.Task[None] | None = None
        self._tasks = TaskSet()
        self._trouble = ""
        self._up_since, self._lines = float("-inf"), RepeatedLines(LOG_INTERVAL)

    async def start(self) -> None:
        """Connect for at most `CONNECT_TIMEOUT` seconds; then keep trying in the background."""
        self._connect()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.up.wait(), CONNECT_TIMEOUT)

    async def reserve(self, bounds: Sequence[Limit], asks: Sequence[LimitRequest]) -> ReserveResult:
        if not self.up.is_set():
            self._connect()
            return self._reserve_alone(bounds, asks)
        decided: asyncio.Future[ReserveResult | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((bounds, asks, decided))
        if self._sending is None:
            self._sending = self._tasks.start(self._send(), "reserve")
        return await decided or self._reserve_alone(bounds, asks)

    def settle(self, bounds: Sequence[Limit], change: Settlement) -> None:
        held = make_settlement((0, 0, change.places, change.money, 0)) if change.places or change.money else None
        for bound in bounds:
            add_settlement(self._settled, bound, change)
            if held is not None and bound.holds:
                self._note_held(bound, held)
            if change.spent and not self.up.is_set():
                self._alone.spent(bound, self._spent(bound))
        if self.up.is_set():
            self._flush_in(SETTLE_INTERVAL if held is None else RELEASE_INTERVAL)

    def spent(self, bound: Limit, at_least: int) -> None:
        self._alone.spent(bound, at_least)
        if self.up.is_set():
            # The ledger may have what is not settled in Redis yet.
            unsent = self._spent(bound) - self._known_of(bound)
            self._note_spent(bound.name, bound.period, max(at_least - unsent, 0))
        else:
            self._ledger[bound.name] = bound.period, at_least
            self._steps.pop(bound.name, None)

    def beat(self) -> None:
        if self.up.is_set():
            self._flush_in(0)

    async def close(self) -> None:
        await cancel_tasks(self._connecting)
        if self.up.is_set() and self._settled:
            await self._call([])
        await self._tasks.wait()
        if self._timer is not None:
            self._timer.cancel()
        with suppress(*FAILURES):
            await self._client.aclose()

    # -- Redis

    async def _send(self) -> None:
        """Send waiting reservations to Redis in batches, until none are left."""
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            replies = await self._call(batch)
            if replies is None:
                batch, self._waiting, replies = batch + self._waiting, [], []
            for at, call in enumerate(batch):
                self._decide(call, replies[at] if replies else None)
        self._sending = None

    def _decide(self, call: _Call, reply: Any) -> None:
        """Pass a decision to the request that waits for it.

        If the client of the request has left, the reservation is given back.
        """
        bounds, asks, decided = call
        if reply is None:
            if not decided.done():
                decided.set_result(None)
            return
        lacking, of, wait, money, left = reply
        if not lacking:
            for bound, ask in zip(bounds, asks, strict=True):
                if bound.holds:
                    self._note_held(bound, make_settlement((0, 0, ask.places, money, 0)))
        if not decided.done():
            decision = make_decision((left, money, lacking - 1 if lacking else None, of, wait))
            decided.set_result(make_reserve_result((decision, bounds, self)))
        elif not lacking:
            for bound, ask in zip(bounds, asks, strict=True):
                self.settle((bound,), Settlement(-ask.requests, -ask.tokens, -ask.places, -money))

    async def _call(self, calls: Sequence[_Call], restore: bool = False) -> list[Any] | None:
        """Run the script and return its decisions in the order of `calls`.

        Return None if Redis is unavailable. If `restore` is True, this process reports what it
        holds under a new name, because Redis may have lost or changed what is held under the old
        name.
        """
        async with self._calling:
            return await self._call_next(calls, restore)

    async def _call_next(self, calls: Sequence[_Call], restore: bool) -> list[Any] | None:
        settled, self._settled = self._settled, {}
        if restore:
            # Move what the process holds to a new name, because calls without a reply may have
            # changed what is held under the old name.
            self._gone, self._process = self._process, secrets.token_hex(8)
            settled = {name: (bound, one._replace(places=0, money=0)) for name, (bound, one) in settled.items()}
        try:
            reply = await self._script(keys=[self._prefix], args=[self._asked(calls, settled, restore)])
            self.gateways, epoch, spent, replies = _read_reply(reply, calls)
        except FAILURES as error:
            # The script may have applied the settlements, so they are added to the known spending
            # and not sent again, unless Redis refused to run it: without memory or the right to
            # write, the script's first write fails.
            for name, (bound, change) in settled.items():
                if isinstance(error, ResponseError):
                    add_settlement(self._settled, bound, change)
                elif change.spent:
                    self._note_spent(name, bound.period, self._known_of(bound) + change.spent)
            self._lose(str(error) or type(error).__name__)
            return None
        except asyncio.CancelledError:
            for bound, change in settled.values():
                add_settlement(self._settled, bound, change)
            raise
        for name, (period, micros) in spent:
            self._note_spent(name, period, int(micros))
        known, self._epoch = self._epoch, epoch
        if known not in ("", epoch):
            if self._lines.suffix("loss") is not None:
                log.warning(
                    "Redis at %s has lost the limits' data; rates start full, and budgets are read from the ledger.",
                    self._place,
                )
            self.generation += 1
            if not restore:
                self._tasks.start(self._call([], restore=True))
        self._flush_in(SIGN_OF_LIFE_INTERVAL)
        return replies

    def _asked(self, calls: Sequence[_Call], settled: PendingSettlements, restore: bool) -> bytes:
        budgets = [bound for bounds, *_ in calls for bound in bounds] + [bound for bound, _ in settled.values()]
        holding = [self._held[name] for name in {bound.name for bound in budgets} & self._held.keys()]
        if not calls and (now := time.monotonic()) - self._checked_at >= SIGN_OF_LIFE_INTERVAL:
            self._checked_at = now
            holding = random.sample([*self._held.values()], min(len(self._held), MAX_CHECKED))
        asked = {
            "process": self._process,
            "gone": self._gone,
            "lease": LEASE_TIMEOUT,
            "step": MAX_CLOCK_STEP,
            "busy": SLOT_RETRY_DELAY,
            "never": NO_WAIT_HELPS,
            "slack": TOLERANCE,
            "nolimit": UNLIMITED,
            "silence": LOSS_SILENCE,
            "restore": [[*_limit_values(bound), *change] for bound, change in self._held.values()] if restore else [],
            "spent": [[*_limit_values(bound), known] for bound in budgets if (known := self._known_of(bound))],
            "held": [[*_limit_values(bound), held.places, held.money] for bound, held in holding],
            "settle": [[*_limit_values(bound), *change] for bound, change in settled.values()],
            "calls": [
                [[*_limit_values(bound), *ask] for bound, ask in zip(bounds, asks, strict=True)]
                for bounds, asks, _ in calls
            ],
        }
        return to_json(asked)

    def _connect(self) -> None:
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._reconnect(), name="limits")

    async def _reconnect(self) -> None:
        """Call Redis until it answers.

        Each attempt begins with a PING. A failed call may have been applied, so its settlements are
        not sent again: without the PING, every attempt in an outage would lose settlements.
        """
        is_first = not self._epoch
        while not await self._answers() or await self._call([], restore=True) is None:
            async with self._calling:
                await reconnect(self._client)
            await asyncio.sleep(RETRY_INTERVAL)
        if self._trouble:
            log.warning(
                "Redis at %s, which keeps the limits, answers again; gateways share the limits again.", self._place
            )
            self._trouble = ""
        # A Redis that kept its data knows more than the ledger; `_call_next` notices a loss.
        self.generation += is_first
        self._ledger.clear()
        self._up_since = time.monotonic()
        self.up.set()

    async def _answers(self) -> bool:
        try:
            await self._client.ping()
        except FAILURES as error:
            self._lose(str(error) or type(error).__name__)
            return False
        return True

    def _lose(self, trouble: str) -> None:
        """Decide alone from now on.

        The log gets one line per outage, however many requests notice the outage.
        """
        if self.up.is_set():
            self.up.clear()
            self.generation += 1
            self._connect()
            # A Redis that fails again and again must not refill each limit at every failure.
            if time.monotonic() - self._up_since >= MINUTE:
                self._alone.reset_rates()
                self._parts.clear()
                self._steps.clear()
        if not self._trouble and self._lines.suffix("failure") is not None:
            share = "this gateway enforces its share of each limit until Redis answers"
            log.error("Redis at %s, which keeps the limits, is not usable (%s); %s.", self._place, trouble, share)
            self._trouble = trouble

    # -- settling

    def _flush_in(self, seconds: float) -> None:
        """Send settlements after `seconds`, unless a reservation carries them earlier."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        if self._timer is not None:
            if self._flush_at <= due:
                return
            self._timer.cancel()
        # Keep the due time here: uvloop's handle does not return it for a call that is due at once.
        self._flush_at, self._timer = due, loop.call_at(due, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self.up.is_set():
            self._tasks.start(self._call([]))

    def _note_held(self, bound: Limit, change: Settlement) -> None:
        add_settlement(self._held, bound, change)
        # Without Redis, what open requests hold comes out of this gateway's part.
        self._alone.hold(bound, change.places, change.money)
        held = self._held[bound.name][1]
        if held.places <= 0 and held.money <= 0:
            del self._held[bound.name]

    # -- without Redis

    def _reserve_alone(self, bounds: Sequence[Limit], asks: Sequence[LimitRequest]) -> ReserveResult:
        """Decide with this gateway's share of each limit."""
        shares = [self._share(bound) for bound in bounds]
        return self._alone.reserve_now(shares, asks)

    def _share(self, bound: Limit) -> Limit:
        parts = max(self.gateways, self._least_parts)
        share = bound.share(parts)
        if bound.money < UNLIMITED:
            known = self._spent(bound)
            self._alone.spent(share, known)
            # Computed once per outage: later spending comes out of this gateway's share of the
            # rest.
            part = known + max(bound.money - known, 0) / parts
            part = self._parts.setdefault((bound.name, bound.period, bound.money), part)
            period, step = self._steps.get(bound.name, (0, 0.0))
            if period != bound.period:
                step = known + self._alone.held_money(bound.name) + bound.money * BUDGET_STEP / parts
                self._steps[bound.name] = bound.period, step
            share.money = min(part, step)
        return share

    def _carry(self, bounds: Iterable[Limit], spent: int) -> None:
        """Remember money spent while Redis is unavailable, and report it to Redis later.

        `spent` is in micro-dollars and counts for each of `bounds`.
        """
        for bound in bounds:
            add_settlement(self._settled, bound, Settlement(spent=spent))

    # -- budgets

    def _note_spent(self, name: str, period: int, micros: int) -> None:
        if len(self._known) > MAX_REMEMBERED:
            self._known.clear()
        known, before = self._known.get(name, (period, 0))
        if period >= known:
            self._known[name] = period, max(micros, before) if period == known else micros

    def _known_of(self, bound: Limit) -> int:
        """Return the micro-dollars spent in the limit's period according to Redis or the ledger."""
        period, micros = self._known.get(bound.name, (0, 0))
        return micros if period == bound.period else 0

    def _spent(self, bound: Limit) -> int:
        """Return the spending in the limit's period, with unsent settlements, in micro-dollars."""
        settled = self._settled.get(bound.name)
        period, micros = self._ledger.get(bound.name, (0, 0))
        known = self._known_of(bound) + (settled[1].spent if settled else 0)
        return max(known, micros) if period == bound.period else known


class _FallbackLimiter(InMemoryLimiter):
    """The limits of this gateway while Redis is unavailable.

    `carry` is called with the money that is spent in the meantime.
    """

    def __init__(self, carry: Callable[[Iterable[Limit], int], None], clock: Callable[[], float] | None) -> None:
        super().__init__(**({"clock": clock} if clock else {}))
        self._carry = carry

    def settle(self, bounds: Sequence[Limit], change: Settlement) -> None:
        super().settle(bounds, change)
        if change.spent:
            self._carry(bounds, change.spent)


def _read_reply(reply: Any, calls: Sequence[_Call]) -> tuple[int, str, list[Any], list[Any]]:
    """Return gateways, epoch, spending and decisions (in the order of `calls`) of a reply.

    Raises:
        ValueError: The reply is not from the script, but from another program or a proxy.
    """
    try:
        gateways, epoch, spent, answers = _REPLY.validate_json(reply)
    except ValidationError:
        raise ValueError("its reply is not from the limits' script") from None
    asked = [len(bounds) for bounds, *_ in calls]
    if [len(left) for *_, left in answers] != asked or any(
        lacking > count for (lacking, *_), count in zip(answers, asked, strict=True)
    ):
        raise ValueError("its reply does not fit the reservations")
    decisions = [(lacking, of, wait, int(money), left) for lacking, of, wait, money, left in answers]
    return gateways, epoch, list(spent), decisions


def _limit_values(bound: Limit) -> tuple[str, float, float, float, float, int]:
    return bound.name, bound.requests, bound.tokens, bound.places, bound.money, bound.period
