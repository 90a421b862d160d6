"""Limits of one machine: a table in shared memory, for any number of workers and gateways, that outlives them all.

Time is the system's monotonic clock, which all of its processes share and nobody sets.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmops.gateway.callers.limits.base import LEASE, Limiter, Reserved
from llmops.gateway.callers.limits.buckets import MINUTE, MONEY, RATE, Bucket, Change, Decision, Want, decide
from llmops.gateway.callers.limits.table import PATIENCE, Table

log = logging.getLogger(__name__)

# Seconds for which a row is worth its place: a hold as long as requests last, what was spent as long as periods do.
_HELD, _OVER = 7200.0, 40 * 86_400.0
_MEMORY, _LONG_AGO = ":memory:", float("-inf")
# that wait for a table which cannot be used
_MOST_CHANGES = 10_000
_MOST_NAMES = 10_000


class _Names(NamedTuple):
    """The rows of a hold: of each living process, of this one, and of what is spent."""

    held: Sequence[str]
    mine: str
    spent: str


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
        self._alive: Sequence[str] = ()
        self._known: dict[tuple[str, str], _Names] = {}
        self._seen, self._changes_seen = _LONG_AGO, -1
        self._spare: Embedded | None = None
        self._broken_until = 0.0
        self._late: list[Change] = []
        self.table: Table | None = None

    @property
    def machine(self) -> str:
        """The same for all who share the file."""
        return self.table.machine if self._ready() and self.table is not None else self.process.hex()

    async def reserve(self, wants: Sequence[Want]) -> Reserved:
        return self.reserve_now(wants)

    def reserve_now(self, wants: Sequence[Want]) -> Reserved:
        table = self._locked()
        if table is None:
            return self._own().reserve_now(wants)
        try:
            return Reserved(self._reserve(table, wants, self._clock()), wants, self)
        finally:
            table.unlock()

    def settle(self, changes: Sequence[Change]) -> None:
        table = self._locked()
        if table is None:
            self._late = [*self._late, *changes][-_MOST_CHANGES:]
            return
        try:
            self._settle(table, changes, self._clock())
        finally:
            table.unlock()

    def spent(self, key: str, at_least: int) -> None:
        table = self._locked()
        if table is None:
            return
        name, now = f"{MONEY}:{key}", self._clock()
        at, _, spent = table.find(name)
        table.write(name, at, now, max(spent, at_least), now + _OVER)
        table.unlock()

    def beat(self) -> None:
        table = self._locked()
        if table is not None:
            self._live(table, self._clock(), 0.0)
            table.unlock()

    async def close(self) -> None:
        table = self._locked()
        if table is not None:
            table.leave(self.process)
            table.close()
        self.table, self._broken_until = None, float("inf")

    # -- what is kept ----------------------------------------------------------------------------------------------

    def _reserve(self, table: Table, wants: Sequence[Want], now: float) -> Decision:
        left: list[float] = []
        stamps: list[tuple[int, float]] = []
        for want in wants:
            if want.kind == RATE:
                at, bucket = _bucket(table, want, now)
                left.append(bucket.level)
                stamps.append((at, bucket.stamp))
            else:
                left.append(self._room(table, want, now))
                stamps.append((0, now))
        decision = decide(wants, left)
        if decision.lacking is None:
            for want, given, level, (at, stamp) in zip(wants, decision.given, decision.left, stamps, strict=True):
                if want.kind == RATE:
                    _keep(table, want, at, level, stamp)
                else:
                    _hold(table, self._names(want).mine, given, now)
        return decision

    def _settle(self, table: Table, changes: Sequence[Change], now: float) -> None:
        for change in changes:
            if change.kind == RATE:
                at, bucket = _bucket(table, change, now)
                level, stamp = bucket.less(change.used, change.limit)
                _keep(table, change, at, level, stamp)
                continue
            names = self._names(change)
            _hold(table, names.mine, -change.held, now)
            if change.used:
                at, _, spent = table.find(names.spent)
                table.write(names.spent, at, now, spent + change.used, now + _OVER)

    def _room(self, table: Table, want: Want, now: float) -> float:
        """What is left of a hold: without what living processes have of it and, of money, without what is spent."""
        self._live(table, now, 1.0)
        room: float = want.limit
        names = self._names(want)
        for name in names.held:
            room -= table.find(name)[2]
        return room - table.find(names.spent)[2] if want.kind == MONEY else room

    def _live(self, table: Table, now: float, every: float) -> None:
        """Say that this process lives, and look who else does, each `every` seconds; at once when one came or went."""
        if self._seen <= now < self._seen + every and table.changes == self._changes_seen:
            return
        self._seen = now
        table.see(self.process, now, now - 4 * LEASE)
        living = [process for process, seen in table.processes().items() if now - LEASE < seen <= now + 1]
        alive = [process.hex() for process in living]
        if alive != self._alive:
            self._alive = alive
            self._known.clear()
        self._changes_seen = table.changes

    def _names(self, of: Want | Change) -> _Names:
        """What is kept of a hold, worked out once while the same processes live."""
        known = self._known.get((of.kind, of.key))
        if known is None:
            if len(self._known) > _MOST_NAMES:
                self._known.clear()
            hold = f"{of.kind}:{of.key}"
            held = [f"{hold}:{process}" for process in self._alive]
            known = _Names(held, f"{hold}:{self.process.hex()}", f"{MONEY}:{of.key}")
            self._known[of.kind, of.key] = known
        return known

    # -- the table -------------------------------------------------------------------------------------------------

    def _locked(self) -> Table | None:
        """The table, with what was late; None where it cannot be used."""
        if not self._ready():
            return None
        assert self.table is not None
        try:
            self.table.lock(self._patience)
        except OSError as error:
            self._break(error)
            return None
        if self._late:
            late, self._late = self._late, []
            self._settle(self.table, late, self._clock())
        return self.table

    def _ready(self) -> bool:
        if self.table is not None and not self._broken_until:
            return True
        if self._clock() < self._broken_until:
            return False
        try:
            self.table = Table(None if self._path == _MEMORY else self._path)
            self.table.lock(self._patience)
            self._broken_until = 0.0
            self._live(self.table, self._clock(), 0.0)
            self.table.unlock()
        except (OSError, ValueError) as error:
            self._break(error)
            return False
        return True

    def _break(self, error: Exception) -> None:
        if not self._broken_until:
            log.error("The limits in %s cannot be used (%s); this worker counts for itself.", self._path, error)
        self._broken_until = self._clock() + 1.0
        if self.table is not None:
            self.table.close()
            self.table = None

    def _own(self) -> Embedded:
        if self._spare is None:
            self._spare = Embedded(_MEMORY, self._clock)
        return self._spare


def _bucket(table: Table, of: Want | Change, now: float) -> tuple[int, Bucket]:
    """Where the rate is, and what it has now."""
    at, stamp, level = table.find(of.key)
    return at, Bucket(level, stamp).at(now, of.limit) if at else Bucket(of.limit, now)


def _keep(table: Table, of: Want | Change, at: int, level: float, stamp: float) -> None:
    """Until it is full again: that is what no row says too."""
    table.write(of.key, at, stamp, level, stamp + (of.limit - level) * MINUTE / of.limit)


def _hold(table: Table, name: str, more: int, now: float) -> None:
    at, _, held = table.find(name)
    held = max(held + more, 0.0)
    table.write(name, at, now, held, now + _HELD if held else now)
