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

from llmops.gateway.callers.limits.base import LEASE, Limiter, Reserved
from llmops.gateway.callers.limits.buckets import MINUTE, MONEY, RATE, Change, Decision, Want, decide, refilled
from llmops.gateway.callers.limits.table import PATIENCE, Row, Table

log = logging.getLogger(__name__)

# Seconds for which a row is worth its place: a hold as long as requests last, what was spent as long as periods do.
_HELD, _OVER = 7200.0, 40 * 86_400.0
# Seconds between two looks at which processes live.
LOOK = 1.0
_MEMORY, _LONG_AGO = ":memory:", float("-inf")
# that wait for a table which cannot be used
_MOST_CHANGES = 10_000
_MOST_ROWS = 10_000


class _Hold:
    """What this process holds, which nobody else writes: kept here as well as in its row (`mine`). `others`: the rows
    of those of `alive`. `spent`: that of what is spent for good, of money."""

    __slots__ = ("alive", "held", "mine", "others", "spent")

    def __init__(self, mine: Row, spent: Row | None) -> None:
        self.mine, self.spent, self.held = mine, spent, 0.0
        self.others: Sequence[Row] = ()
        self.alive: Sequence[bytes] = ()


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
        self._alive: Sequence[bytes] = ()
        self._rates: dict[str, Row] = {}
        self._holds: dict[tuple[str, str], _Hold] = {}
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
        now = self._clock()
        row = self._hold(MONEY, key).spent
        assert row is not None
        table.write(row, now, max(_amount(table, row), at_least), now + _OVER)
        table.unlock()

    def beat(self) -> None:
        table = self._locked()
        if table is not None:
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
        # of each want where it is kept, and of when its level is
        kept: list[tuple[Row | _Hold, float]] = []
        for kind, key, limit, _, _ in wants:
            if kind == RATE:
                row = self._rate(key)
                level, stamp = _level(table, row, now, limit)
                left.append(level)
                kept.append((row, stamp))
            else:
                hold = self._hold(kind, key)
                left.append(_room(table, hold, limit))
                kept.append((hold, now))
        decision = decide(wants, left)
        if decision.lacking is None:
            for want, given, level, (one, stamp) in zip(wants, decision.given, decision.left, kept, strict=True):
                if isinstance(one, Row):
                    _keep(table, one, level, stamp, want.limit)
                else:
                    _add(table, one, given, now)
        return decision

    def _settle(self, table: Table, changes: Sequence[Change], now: float) -> None:
        for kind, key, limit, held, used in changes:
            if kind == RATE:
                row = self._rate(key)
                level, stamp = _level(table, row, now, limit)
                _keep(table, row, min(level - used, limit), stamp, limit)
                continue
            hold = self._hold(kind, key)
            _add(table, hold, -held, now)
            if used and hold.spent:
                table.write(hold.spent, now, _amount(table, hold.spent) + used, now + _OVER)

    def _rate(self, key: str) -> Row:
        row = self._rates.get(key)
        if row is None:
            if len(self._rates) > _MOST_ROWS:
                self._rates.clear()
            row = self._rates[key] = Row(key)
        return row

    def _hold(self, kind: str, key: str) -> _Hold:
        hold = self._holds.get((kind, key))
        if hold is None:
            if len(self._holds) > _MOST_ROWS:
                self._holds = {name: one for name, one in self._holds.items() if one.held}
            mine = Row(f"{kind}:{key}:{self.process.hex()}")
            hold = self._holds[kind, key] = _Hold(mine, Row(f"{kind}:{key}") if kind == MONEY else None)
        if hold.alive is not self._alive:
            hold.alive = self._alive
            hold.others = [Row(f"{kind}:{key}:{one.hex()}") for one in self._alive if one != self.process]
        return hold

    def _live(self, table: Table, now: float) -> None:
        """Say that this process lives, and look who else does."""
        self._seen = now
        table.see(self.process, now, now - 4 * LEASE)
        living = [process for process, seen in table.processes().items() if now - LEASE < seen <= now + 1]
        if living != self._alive:
            self._alive = living
        self._changes_seen = table.changes

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
        now = self._clock()
        if not self._seen <= now < self._seen + LOOK or self.table.changes != self._changes_seen:
            self._live(self.table, now)
        if self._late:
            late, self._late = self._late, []
            self._settle(self.table, late, now)
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
            self._live(self.table, self._clock())
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


def _level(table: Table, row: Row, now: float, limit: int) -> tuple[float, float]:
    """What a rate has now, and of when that is."""
    found = table.find(row)
    return refilled(found[1], found[0], now, limit) if found else (limit, now)


def _room(table: Table, hold: _Hold, limit: int) -> float:
    """What is left: without what living processes hold, and without what is spent."""
    room = limit - hold.held
    if hold.spent:
        room -= _amount(table, hold.spent)
    for row in hold.others:
        room -= _amount(table, row)
    return room


def _amount(table: Table, row: Row) -> float:
    found = table.find(row)
    return found[1] if found else 0.0


def _keep(table: Table, row: Row, level: float, stamp: float, limit: int) -> None:
    """Until it is full again: that is what no row says too."""
    table.write(row, stamp, level, stamp + (limit - level) * MINUTE / limit)


def _add(table: Table, hold: _Hold, more: int, now: float) -> None:
    hold.held = held = max(hold.held + more, 0.0)
    table.write(hold.mine, now, held, now + _HELD if held else now)
