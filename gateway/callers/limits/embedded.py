"""Limits of one machine: a table in shared memory, for any number of workers and gateways, that outlives them all.

Time is the system's monotonic clock, which all of its processes share and nobody sets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from llmops.gateway.callers.limits.base import LEASE, Limiter, Reserved, reserved_of
from llmops.gateway.callers.limits.buckets import (
    MINUTE,
    NO_LIMIT,
    Ask,
    Bound,
    Change,
    Decision,
    Left,
    Record,
    Sums,
    add_to,
    decide,
    renewed,
)
from llmops.gateway.callers.limits.table import PATIENCE, Row, Table

log = logging.getLogger(__name__)

# Seconds for which a row is worth its place: a hold as long as requests last, what was spent as long as periods do.
_HELD, _OVER = 7200.0, 40 * 86_400.0
# Seconds between two looks at which processes live.
LOOK = 1.0
_MEMORY, _LONG_AGO = ":memory:", float("-inf")
# Seconds for which what was settled waits for a reservation of the same quotas, whose work it shares.
SOON = 0.005
_MOST_ROWS = 10_000


class _Account:
    """Where a quota's record is, and what this process holds of it, which nobody else writes: kept here as well as in a
    row of its own (`mine`). `others`: the rows of other processes.
    """

    __slots__ = ("mine", "money", "others", "places", "row")

    def __init__(self, name: str, process: bytes, others: Iterable[bytes]) -> None:
        self.row, self.mine = Row(name), _held_by(process, name)
        self.others: Sequence[Row] = [_held_by(one, name) for one in others]
        self.places = self.money = 0

    def read(self, table: Table, bound: Bound, now: float, change: Change | None = None) -> Record:
        """With `change`, which was settled. What is given back never makes more of it than its limits."""
        found = table.find(self.row)
        kept = found[1:6] if found is not None else (now, bound.requests, bound.tokens, 0.0, bound.period)
        record = renewed(kept, bound, now)
        if change is None:
            return record
        stamp, requests, tokens, spent, period = record
        self.places += change.places
        self.money += change.money
        requests, tokens = min(requests - change.requests, bound.requests), min(tokens - change.tokens, bound.tokens)
        return stamp, requests, tokens, spent + change.spent, period

    def left(self, table: Table, bound: Bound, record: Record) -> Left:
        """Without what living processes hold."""
        _, requests, tokens, spent, _ = record
        places, money = bound.places - self.places, bound.money - spent - self.money
        for row in self.others:
            held = table.find(row)
            if held is not None:
                places, money = places - held[2], money - held[3]
        return requests, tokens, places, money

    def write(self, table: Table, bound: Bound, record: Record, now: float) -> None:
        """Of a process that is killed in between the time is written first: what is lost is refill. The row is kept
        until it is full again: that is what no row says too.
        """
        stamp, requests, tokens, spent, period = record
        if bound.money < NO_LIMIT:
            until = now + _OVER
        else:
            until = stamp + MINUTE - MINUTE * min(requests / bound.requests, tokens / bound.tokens)
        table.write(self.row, stamp, requests, tokens, spent, period, until)
        if bound.holds:
            places, money = self.places, self.money
            table.write(self.mine, now, places, money, 0.0, 0.0, now + _HELD if places or money else now)


def _held_by(process: bytes, name: str) -> Row:
    return Row(f"{name}:{process.hex()}")


def folder() -> Path:
    """Where limits are kept: in memory where the system has such a folder, made for this user alone."""
    for base in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        place = base / f"llmops-limits-{os.getuid()}"
        with suppress(OSError):
            place.mkdir(mode=0o700, exist_ok=True)
            if place.stat().st_uid == os.getuid() and not place.is_symlink():
                return place
    return Path(tempfile.mkdtemp(prefix="llmops-limits-"))


class Embedded(Limiter):
    """Limits in the file at `path`. Where it cannot be used (a full disk, a process that stopped in the middle), this
    process counts for itself until it can."""

    def __init__(
        self, path: Path | str, clock: Callable[[], float] = time.monotonic, patience: float = PATIENCE
    ) -> None:
        self._path, self._clock, self._patience = str(path), clock, patience
        self.process = secrets.token_bytes(16)
        self._others: Sequence[bytes] = ()
        self._accounts: dict[str, _Account] = {}
        self._seen, self._changes_seen = _LONG_AGO, b""
        self._spare: Embedded | None = None
        self._settled: Sums = {}
        self._timer: asyncio.TimerHandle | None = None
        self.table: Table
        self._usable, self._broken_until = False, 0.0

    @property
    def machine(self) -> str:
        """The same for all who share the file."""
        return self.table.machine if self._usable or self._open() else self.process.hex()

    async def reserve(self, bounds: Sequence[Bound], asks: Sequence[Ask]) -> Reserved:
        return self.reserve_now(bounds, asks)

    def reserve_now(self, bounds: Sequence[Bound], asks: Sequence[Ask]) -> Reserved:
        now = self._begin()
        if now is None:
            return self._own().reserve_now(bounds, asks)
        try:
            return reserved_of((self._reserve(bounds, asks, now), bounds, self))
        finally:
            self.table.unlock()

    def settle(self, bounds: Sequence[Bound], change: Change) -> None:
        """With what its bounds are asked for next, and soon without."""
        for bound in bounds:
            add_to(self._settled, bound, change)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SOON, self._settle_now)

    def spent(self, bound: Bound, at_least: int) -> None:
        # what was settled here is part of it
        self.beat()
        now = self._begin()
        if now is None:
            return
        account = self._accounts.get(bound.name) or self._new(bound.name)
        stamp, requests, tokens, spent, period = account.read(self.table, bound, now)
        if period == bound.period and spent < at_least:
            account.write(self.table, bound, (stamp, requests, tokens, at_least, period), now)
        self.table.unlock()

    def _settle_now(self) -> None:
        """Where nothing was asked for meanwhile that it could have gone with."""
        self._timer = None
        if self._settled:
            self.beat()

    def beat(self) -> None:
        """Also settles."""
        now = self._begin()
        if now is None:
            return
        settled, self._settled = self._settled, {}
        for name, (bound, change) in settled.items():
            account = self._accounts.get(name) or self._new(name)
            account.write(self.table, bound, account.read(self.table, bound, now, change), now)
        self.table.unlock()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.beat()
        if self._begin() is not None:
            self.table.leave(self.process)
            self.table.close()
        self._usable, self._broken_until = False, float("inf")

    # -- what is kept ----------------------------------------------------------------------------------------------

    def _reserve(self, bounds: Sequence[Bound], asks: Sequence[Ask], now: float) -> Decision:
        """Each record is read once and written once."""
        table, settled = self.table, self._settled
        accounts, left = [], []
        for bound in bounds:
            name = bound.name
            account = self._accounts.get(name) or self._new(name)
            change = settled.pop(name)[1] if name in settled else None
            record = account.read(table, bound, now, change)
            accounts.append((account, record, change))
            left.append(account.left(table, bound, record))
        decision = decide(bounds, asks, left)
        for at, (account, record, change) in enumerate(accounts):
            if decision.lacking is None:
                requests, tokens, _, _ = decision.left[at]
                stamp, _, _, spent, period = record
                account.places += asks[at].places
                account.money += decision.money
                account.write(table, bounds[at], (stamp, requests, tokens, spent, period), now)
            elif change is not None:
                account.write(table, bounds[at], record, now)
        return decision

    def _new(self, name: str) -> _Account:
        if len(self._accounts) > _MOST_ROWS:
            self._accounts = {name: one for name, one in self._accounts.items() if one.places or one.money}
        account = self._accounts[name] = _Account(name, self.process, self._others)
        return account

    def _live(self, now: float) -> None:
        """Say that this process lives, and look who else does."""
        table, self._seen = self.table, now
        table.see(self.process, now, now - 4 * LEASE)
        living = table.processes().items()
        others = [one for one, seen in living if one != self.process and now - LEASE < seen <= now + 1]
        if others != self._others:
            self._others = others
            for name, account in self._accounts.items():
                account.others = [_held_by(one, name) for one in others]
        self._changes_seen = table.changes

    # -- the table -------------------------------------------------------------------------------------------------

    def _begin(self) -> float | None:
        """The table is this process's until `unlock`: the time; None where it cannot be used."""
        if not (self._usable or self._open()):
            return None
        table = self.table
        try:
            table.lock(self._patience)
        except OSError as error:
            self._break(error)
            return None
        now = self._clock()
        if not self._seen <= now < self._seen + LOOK or table.changes != self._changes_seen:
            self._live(now)
        return now

    def _open(self) -> bool:
        if self._clock() < self._broken_until:
            return False
        try:
            self.table = Table(None if self._path == _MEMORY else self._path)
            self._usable = True
            self.table.lock(self._patience)
            self._live(self._clock())
            self.table.unlock()
        except (OSError, ValueError) as error:
            self._break(error)
            return False
        self._broken_until = 0.0
        return True

    def _break(self, error: Exception) -> None:
        if not self._broken_until:
            log.error("The limits in %s cannot be used (%s); this worker counts for itself.", self._path, error)
        self._broken_until = self._clock() + 1.0
        if self._usable:
            self._usable = False
            self.table.close()

    def _own(self) -> Embedded:
        if self._spare is None:
            self._spare = Embedded(_MEMORY, self._clock)
        return self._spare
