"""Limits that several gateways share, in Redis or Valkey; this machine's own while that is away.

All that one turn of the event loop asks goes as one EVALSHA, with what was settled meanwhile, and while that is on its
way the next one gathers. Who has no reply in `PATIENCE` is answered by the machine's own limiter with its share of each
limit, and so is everybody until the reply comes; what it gave too late is given back. A Redis that is only slow, on a
busy machine, is no alarm: one is away when its connection fails, or says nothing for `GIVE_UP`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json
from redis.asyncio import Redis
from redis.exceptions import RedisError

from llmops.clocks import within
from llmops.gateway.callers.limits.base import LEASE, Limiter, Reserved, reserved_of
from llmops.gateway.callers.limits.buckets import (
    BUSY,
    NEVER,
    NO_LIMIT,
    SLACK,
    STEP,
    Ask,
    Bound,
    Change,
    Left,
    Sums,
    add_to,
    change_of,
    decision_of,
)
from llmops.gateway.callers.limits.embedded import Embedded
from llmops.gateway.callers.limits.wire import Wire

log = logging.getLogger(__name__)

# with the version of what is kept: gateways of two versions each have their own
PREFIX = "{llmops:limits:2}"
# Seconds; and turns of the event loop, since one that was busy sees the time first and the reply after it.
PATIENCE, TURNS = 0.004, 4
GIVE_UP = 0.25
# calls of one command, which holds up Redis for less than a millisecond
MOST = 64
CONNECT = 0.5
# Seconds for which what was settled waits for a reservation to go with: places and money are waited for.
SETTLED, HELD = 0.5, 0.05
PAUSES = (0.2, 0.4, 0.8)
_SCRIPT = Path(__file__).with_name("reserve.lua")
_FAILURES = (RedisError, OSError, asyncio.TimeoutError, EOFError)

_Call = tuple[Sequence[Bound], Sequence[Ask], "asyncio.Future[Reserved | None]"]


class Shared(Limiter):
    """Limits in the Redis at `url`, or `own` where it does not answer. Starts at the first reservation."""

    def __init__(
        self, url: str, own: Embedded, prefix: str = PREFIX, patience: float = PATIENCE, give_up: float = GIVE_UP
    ) -> None:
        self._url, self._own, self._prefix, self._patience, self._give_up = url, own, prefix, patience, give_up
        self.machines = 1
        self.up = asyncio.Event()
        self._calls: list[_Call] = []
        self._sent: list[_Call] = []
        self._settled: Sums = {}
        # what this process holds
        self._held: Sums = {}
        self._spent: dict[str, tuple[Bound, int]] = {}
        self._process, self._gone = "", ""
        # the script's name there
        self._sha = b""
        self._wire: Wire | None = None
        # whether there is something to ask for, it will be at the end of this turn, and a reply is waited for
        self._wanted = self._due = self._asking = False
        self._beats = False
        self._timer: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._trouble = ""

    async def start(self) -> None:
        """Connect, for as long as that may take at most (`CONNECT`); afterwards it goes on trying."""
        self._begin()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.up.wait(), CONNECT)

    async def reserve(self, bounds: Sequence[Bound], asks: Sequence[Ask]) -> Reserved:
        self._begin()
        if self.up.is_set():
            future: asyncio.Future[Reserved | None] = asyncio.get_running_loop().create_future()
            self._calls.append((bounds, asks, future))
            self._want()
            reserved = await future
            if reserved is not None:
                return reserved
        shares = bounds if self.machines == 1 else [bound.share(self.machines) for bound in bounds]
        return self._own.reserve_now(shares, asks)

    def settle(self, bounds: Sequence[Bound], change: Change) -> None:
        held = change_of((0, 0, change.places, change.money, 0)) if change.places or change.money else None
        for bound in bounds:
            add_to(self._settled, bound, change)
            if held is not None and bound.holds:
                self._note_held(bound, held)
        if self.up.is_set() and (self._timer is None or held):
            loop, wait = asyncio.get_running_loop(), HELD if held else SETTLED
            if self._timer is None or self._timer.when() > loop.time() + wait:
                self._stop_timer()
                self._timer = loop.call_later(wait, self._settle_now)

    def spent(self, bound: Bound, at_least: int) -> None:
        self._spent[bound.name] = bound, at_least
        self._own.spent(bound, at_least)

    def beat(self) -> None:
        self._own.beat()
        self._beats = True
        self._want()

    async def close(self) -> None:
        if self._task is not None:
            if self._settled and self.up.is_set():
                # goes with what was settled, and its reply says that it is there
                await self.reserve((), ())
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._own.close()

    def _settle_now(self) -> None:
        """Nobody asked for anything that it could have travelled with."""
        self._stop_timer()
        self._want()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the connection --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._stay(), name="limits")

    async def _stay(self) -> None:
        """Connected for as long as it answers, and again soon after."""
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            began, answered = loop.time(), False
            try:
                wire = await within(CONNECT, self._connect())
                answered = True
                await wire.over
            except _FAILURES as error:
                self._say(_told(error))
            finally:
                self._away()
            failures = 0 if answered and loop.time() - began > 10 else failures + 1
            await asyncio.sleep(PAUSES[min(failures, len(PAUSES) - 1)])

    async def _connect(self) -> Wire:
        """When it answers. What this process holds is held under a new name: of a reply that never came nobody knows
        what it said."""
        pool = Redis.from_url(self._url, protocol=2).connection_pool
        options = {**pool.connection_kwargs, "socket_timeout": None, "socket_connect_timeout": CONNECT}
        connection = pool.connection_class(**options)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_command("SCRIPT", "LOAD", _SCRIPT.read_bytes())
            self._sha = await connection.read_response()
            self._gone, self._process = self._process, f"{self._own.machine}/{secrets.token_hex(4)}"
            for name, (bound, change) in self._settled.items():
                self._settled[name] = bound, change._replace(places=0, money=0)
            await connection.send_packed_command(self._command([], self._held))
            self.machines, _ = from_json(await connection.read_response())
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._wire = wire = Wire(connection)
        self._say("")
        self.up.set()
        self._want()
        return wire

    def _want(self) -> None:
        """By the end of this turn of the loop all have asked who do so in it; or by the next reply."""
        self._wanted = True
        if not (self._due or self._asking) and self._wire is not None:
            self._due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._due = False
        if self._wire is None or self._asking:
            return
        self._wanted = False
        if not (self._calls or self._settled or self._spent or self._beats):
            return
        self._asking, self._beats = True, False
        self._sent, self._calls = self._calls[:MOST], self._calls[MOST:]
        self._wanted = bool(self._calls)
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(self._patience, self._if_still, self._sent, self._is_late)
        self._wire.ask(self._command(self._sent), self._replied)

    def _replied(self, reply: bytes) -> None:
        self.machines, replies = from_json(reply)
        self._not_asking()
        self.up.set()
        sent, self._sent = self._sent, []
        for call, one in zip(sent, replies, strict=True):
            self._answer(*call, *one)
        if self._wanted:
            self._want()

    def _if_still(self, sent: list[_Call], then: Callable[[list[_Call]], None], turns: int = TURNS) -> None:
        """Where nothing came for `sent` meanwhile."""
        if sent is not self._sent:
            return
        if turns:
            asyncio.get_running_loop().call_soon(self._if_still, sent, then, turns - 1)
        else:
            then(sent)

    def _is_late(self, sent: list[_Call]) -> None:
        self._go_on()
        asyncio.get_running_loop().call_later(self._give_up, self._if_still, sent, self._give_it_up)

    def _give_it_up(self, _: list[_Call]) -> None:
        self._say(f"nothing for {(self._patience + self._give_up) * 1000:g} ms")
        if self._wire is not None:
            self._wire.end(None)
        self._away()

    def _go_on(self) -> None:
        """Everybody who waits is answered by this machine."""
        self.up.clear()
        for *_, future in (*self._sent, *self._calls):
            if not future.done():
                future.set_result(None)
        self._calls = []

    def _not_asking(self) -> None:
        self._asking = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _away(self) -> None:
        self._go_on()
        self._not_asking()
        self._sent = []
        wire, self._wire = self._wire, None
        if wire is not None:
            closing = asyncio.get_running_loop().create_task(wire.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _command(self, calls: Sequence[_Call], held: Sums | None = None) -> bytes:
        """What was settled is gone with it, also where no reply comes: it may have been done."""
        settled, self._settled = self._settled, {}
        spent, self._spent = self._spent, {}
        asked: dict[str, Any] = {
            "process": self._process,
            "lease": LEASE,
            "step": STEP,
            "busy": BUSY,
            "never": NEVER,
            "slack": SLACK,
            "nolimit": NO_LIMIT,
            # as plain lists, which become JSON in a third of the time
            "restore": [[*_values(bound), *change] for bound, change in (held or {}).values()],
            "settle": [[*_values(bound), *change] for bound, change in settled.values()],
            "spent": [[*_values(bound), at_least] for bound, at_least in spent.values()],
            "calls": [
                [[*_values(bound), *ask] for bound, ask in zip(bounds, asks, strict=True)] for bounds, asks, _ in calls
            ],
        }
        if self._gone:
            asked["gone"], self._gone = self._gone, ""
        return _packed(b"EVALSHA", self._sha, b"1", self._prefix.encode(), to_json(asked))

    def _answer(
        self,
        bounds: Sequence[Bound],
        asks: Sequence[Ask],
        future: asyncio.Future[Reserved | None],
        lacking: int,
        of: str,
        wait: float,
        money: float,
        left: Sequence[Left],
    ) -> None:
        decision = decision_of((left, int(money), lacking - 1 if lacking else None, of, wait))
        if not lacking:
            for bound, ask in zip(bounds, asks, strict=True):
                if bound.holds:
                    self._note_held(bound, change_of((0, 0, ask.places, decision.money, 0)))
        if not future.done():
            future.set_result(reserved_of((decision, bounds, self)))
        elif not lacking:
            # who asked has left, or was told that nobody answers
            for bound, ask in zip(bounds, asks, strict=True):
                self.settle((bound,), undone(ask, decision.money))

    def _note_held(self, bound: Bound, change: Change) -> None:
        add_to(self._held, bound, change)
        held = self._held[bound.name][1]
        if held.places <= 0 and held.money <= 0:
            del self._held[bound.name]

    def _say(self, trouble: str) -> None:
        """Once per change: a storm needs no log of its own."""
        place = _place(self._url)
        if trouble and not self._trouble:
            share = "this machine's share of each limit holds until it answers"
            log.error("The limits' Redis at %s is not usable (%s); %s.", place, trouble, share)
        elif self._trouble and not trouble:
            log.warning("The limits' Redis at %s answers again.", place)
        self._trouble = trouble


def undone(ask: Ask, money: int) -> Change:
    """The change after which nothing was reserved."""
    return Change(-ask.requests, -ask.tokens, -ask.places, -money)


def _packed(*parts: bytes) -> bytes:
    """A command as Redis reads it. The client's own way takes a quarter of what asking costs."""
    return b"*%d\r\n%b" % (len(parts), b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]))


def _values(bound: Bound) -> tuple[str, float, float, float, float, int]:
    return bound.name, bound.requests, bound.tokens, bound.places, bound.money, bound.period


def _place(url: str) -> str:
    """Without what is secret in it."""
    return url.rpartition("@")[2].removeprefix("redis://").removeprefix("rediss://")


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__
