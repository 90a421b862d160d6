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
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from llmops.gateway.callers.limits.base import LEASE, Limiter, Reserved
from llmops.gateway.callers.limits.buckets import (
    BUSY,
    NEVER,
    RATE,
    SLACK,
    STEP,
    Change,
    Decision,
    Want,
    divided,
)
from llmops.gateway.callers.limits.embedded import Embedded

log = logging.getLogger(__name__)

PREFIX = "{llmops:limits}"
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

# a rate's sum of what was used beyond reservations, or a hold's (given back, spent): one entry per key, however long
# Redis is away
_Settled = dict[tuple[str, str, int], list[int]]
_Call = tuple[Sequence[Want], "asyncio.Future[Reserved | None]"]


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
        self._settled: _Settled = {}
        self._spent: dict[str, int] = {}
        self._held: Counter[tuple[str, str, int]] = Counter()
        self._process, self._gone = "", ""
        self._connection: AbstractConnection | None = None
        self._wanted = asyncio.Event()
        self._beats = False
        self._timer: asyncio.TimerHandle | None = None
        self._exchanging: asyncio.Task[None]
        self._closing: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._trouble = ""

    async def start(self) -> None:
        """Connect, for as long as that may take at most (`CONNECT`); afterwards it goes on trying."""
        self._begin()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.up.wait(), CONNECT)

    async def reserve(self, wants: Sequence[Want]) -> Reserved:
        self._begin()
        if self.up.is_set():
            future: asyncio.Future[Reserved | None] = asyncio.get_running_loop().create_future()
            self._calls.append((wants, future))
            self._wanted.set()
            reserved = await future
            if reserved is not None:
                return reserved
        return self._own.reserve_now(divided(wants, self.machines))

    def settle(self, changes: Sequence[Change]) -> None:
        held = False
        for change in changes:
            sums = self._settled.setdefault((change.kind, change.key, change.limit), [0, 0])
            sums[0] += change.held
            sums[1] += change.used
            if change.kind != RATE:
                self._note_held(change.kind, change.key, change.limit, -change.held)
                held = True
        if self.up.is_set() and (self._timer is None or held):
            loop, wait = asyncio.get_running_loop(), HELD if held else SETTLED
            if self._timer is None or self._timer.when() > loop.time() + wait:
                self._stop_timer()
                self._timer = loop.call_later(wait, self._settle_now)

    def spent(self, key: str, at_least: int) -> None:
        self._spent[key] = max(self._spent.get(key, 0), at_least)
        self._own.spent(key, at_least)

    def beat(self) -> None:
        self._own.beat()
        self._beats = True
        self._wanted.set()

    async def close(self) -> None:
        if self._task is not None:
            if self._settled and self.up.is_set():
                # goes with what was settled, and its reply says that it is there
                await self.reserve(())
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._own.close()

    def _settle_now(self) -> None:
        """Nobody asked for anything that it could have travelled with."""
        self._stop_timer()
        self._wanted.set()

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
                sha = await asyncio.wait_for(self._connect(), CONNECT)
                answered = True
                await self._exchanged(sha)
            except _FAILURES as error:
                self._say(_told(error))
            finally:
                self._away()
            failures = 0 if answered and loop.time() - began > 10 else failures + 1
            await asyncio.sleep(PAUSES[min(failures, len(PAUSES) - 1)])

    async def _connect(self) -> str:
        """The script's name there, when it answers. What this process holds is held under a new name: of a reply that
        never came nobody knows what it said."""
        pool = Redis.from_url(self._url, protocol=2).connection_pool
        options = {**pool.connection_kwargs, "socket_timeout": None, "socket_connect_timeout": CONNECT}
        self._connection = connection = pool.connection_class(**options)
        await connection.connect()  # type: ignore[no-untyped-call]
        await connection.send_command("SCRIPT", "LOAD", _SCRIPT.read_bytes())
        sha: str = (await connection.read_response()).decode()
        self._gone, self._process = self._process, f"{self._own.machine}/{secrets.token_hex(4)}"
        for (kind, _, _), sums in self._settled.items():
            sums[0] = sums[0] if kind == RATE else 0
        await self._run(sha, [], [(*key, amount) for key, amount in self._held.items()])
        self._say("")
        self.up.set()
        return sha

    async def _exchanged(self, sha: str) -> None:
        """Until it fails, or is given up by `_late`."""
        self._exchanging = task = asyncio.create_task(self._exchange(sha), name="limits-exchange")
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        if not task.cancelled():
            task.result()

    async def _exchange(self, sha: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # by the time that this goes on, all have asked who do so in this turn of the loop
            await self._wanted.wait()
            self._wanted.clear()
            if not (self._calls or self._settled or self._spent or self._beats):
                continue
            self._beats = False
            self._sent, self._calls = self._calls[:MOST], self._calls[MOST:]
            if self._calls:
                self._wanted.set()
            late = loop.call_later(self._patience, self._if_still, self._sent, self._go_on)
            lost = loop.call_later(self._patience + self._give_up, self._if_still, self._sent, self._give_it_up)
            try:
                replies = await self._run(sha, [wants for wants, _ in self._sent])
            finally:
                late.cancel()
                lost.cancel()
            self.up.set()
            sent, self._sent = self._sent, []
            for (wants, future), reply in zip(sent, replies, strict=True):
                self._answer(wants, future, reply)

    def _if_still(self, sent: list[_Call], then: Callable[[], None], turns: int = TURNS) -> None:
        """Where nothing came for `sent` meanwhile."""
        if sent is not self._sent:
            return
        if turns:
            asyncio.get_running_loop().call_soon(self._if_still, sent, then, turns - 1)
        else:
            then()

    def _give_it_up(self) -> None:
        self._say(f"nothing for {(self._patience + self._give_up) * 1000:g} ms")
        self._away()
        self._exchanging.cancel()

    def _go_on(self) -> None:
        """Everybody who waits is answered by this machine."""
        self.up.clear()
        for _, future in (*self._sent, *self._calls):
            if not future.done():
                future.set_result(None)
        self._calls = []

    def _away(self) -> None:
        self._go_on()
        self._sent = []
        connection, self._connection = self._connection, None
        if connection is not None:
            closing = asyncio.get_running_loop().create_task(_closed(connection))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _run(
        self, sha: str, calls: Sequence[Sequence[Want]], held: Sequence[tuple[str, str, int, int]] = ()
    ) -> list[Any]:
        """One command. What was settled is gone with it, also where no reply comes: it may have been done."""
        settled, self._settled = self._settled, {}
        spent, self._spent = self._spent, {}
        asked: dict[str, Any] = {
            "process": self._process,
            "lease": LEASE,
            "step": STEP,
            "busy": BUSY,
            "never": NEVER,
            "slack": SLACK,
            "restore": held,
            "settle": [[*key, *sums] for key, sums in settled.items()],
            "spent": list(spent.items()),
            # as plain lists, which become JSON in a third of the time
            "calls": [[[*want] for want in wants] for wants in calls],
        }
        if self._gone:
            asked["gone"], self._gone = self._gone, ""
        assert self._connection is not None
        await self._connection.send_command("EVALSHA", sha, 1, self._prefix, to_json(asked))
        self.machines, replies = from_json(await self._connection.read_response())
        return list(replies)

    def _answer(self, wants: Sequence[Want], future: asyncio.Future[Reserved | None], reply: Any) -> None:
        lacking, wait, left, given = reply
        reserved = Reserved(Decision(lacking - 1 if lacking else None, wait, tuple(left), tuple(given)), wants, self)
        for want, amount in zip(wants, given, strict=False):
            if want.kind != RATE:
                self._note_held(want.kind, want.key, want.limit, amount)
        if not future.done():
            future.set_result(reserved)
        elif lacking == 0:
            # who asked has left, or was told that nobody answers
            self.settle(undone(reserved))

    def _note_held(self, kind: str, key: str, limit: int, amount: int) -> None:
        self._held[kind, key, limit] += amount
        if self._held[kind, key, limit] <= 0:
            del self._held[kind, key, limit]

    def _say(self, trouble: str) -> None:
        """Once per change: a storm needs no log of its own."""
        place = _place(self._url)
        if trouble and not self._trouble:
            share = "this machine's share of each limit holds until it answers"
            log.error("The limits' Redis at %s is not usable (%s); %s.", place, trouble, share)
        elif self._trouble and not trouble:
            log.warning("The limits' Redis at %s answers again.", place)
        self._trouble = trouble


def undone(reserved: Reserved) -> list[Change]:
    """The changes after which nothing was reserved."""
    pairs = zip(reserved.wants, reserved.decision.given, strict=True)
    return [Change(want.kind, want.key, want.limit, given, -given if want.kind == RATE else 0) for want, given in pairs]


def _place(url: str) -> str:
    """Without what is secret in it."""
    return url.rpartition("@")[2].removeprefix("redis://").removeprefix("rediss://")


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def _closed(connection: AbstractConnection) -> None:
    with suppress(*_FAILURES):
        await connection.disconnect(nowait=True)
