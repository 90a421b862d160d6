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


class _Rate:
    """A token bucket: what was left of it when."""

    __slots__ = ("limit", "row", "stamp")

    held = 0.0

    def __init__(self, name: str) -> None:
        self.row, self.limit, self.stamp = Row(name), 0, 0.0

    def left(self, table: Table, limit: int, now: float) -> float:
        """Now; `take` goes on from there."""
        self.limit, self.stamp = limit, now
        found = table.find(self.row)
        if found is None:
            return limit
        level, self.stamp = refilled(found[1], found[0], now, limit)
        return level

    def take(self, table: Table, now: float, given: int, level: float) -> None:
        """So that `level` is left. The row is kept until it is full again: that is what no row says too."""
        limit, stamp = self.limit, self.stamp
        table.write(self.row, stamp, level, stamp + (limit - level) * MINUTE / limit)

    def settle(self, table: Table, now: float, change: Change) -> None:
        limit, used = change.limit, change.used
        self.take(table, now, used, min(self.left(table, limit, now) - used, limit))


class _Hold:
    """What open requests have. `held` is this process's, which nobody else writes: kept here as well as in its row
    (`mine`). `others`: the rows of other processes. `spent`: that of what is spent for good, of money."""

    __slots__ = ("held", "mine", "others", "spent")

    def __init__(self, mine: Row, spent: Row | None) -> None:
        self.mine, self.spent, self.held = mine, spent, 0.0
        self.others: Sequence[Row] = ()

    def left(self, table: Table, limit: int, now: float) -> float:
        """Without what living processes hold, and without what is spent."""
        room = limit - self.held
        if self.spent is not None:
            room -= table.amount(self.spent)
        for row in self.others:
            room -= table.amount(row)
        return room

    def take(self, table: Table, now: float, given: int, level: float) -> None:
        self.held = held = max(self.held + given, 0.0)
        table.write(self.mine, now, held, now + _HELD if held else now)

    def settle(self, table: Table, now: float, change: Change) -> None:
        self.take(table, now, -change.held, 0.0)
        if change.used and self.spent is not None:
            table.write(self.spent, now, table.amount(self.spent) + change.used, now + _OVER)


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
        self._kept: dict[tuple[str, str], _Rate | _Hold] = {}
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
        now, row = self._clock(), Row(f"{MONEY}:{key}")
        table.write(row, now, max(table.amount(row), at_least), now + _OVER)
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
        kept = [self._kept.get(want[:2]) or self._new(want) for want in wants]
        decision = decide(wants, [one.left(table, want[2], now) for one, want in zip(kept, wants, strict=True)])
        if decision.lacking is None:
            for one, given, level in zip(kept, decision.given, decision.left, strict=True):
                one.take(table, now, given, level)
        return decision

    def _settle(self, table: Table, changes: Sequence[Change], now: float) -> None:
        for change in changes:
            one = self._kept.get(change[:2]) or self._new(change)
            one.settle(table, now, change)

    def _new(self, of: Want | Change) -> _Rate | _Hold:
        kind, key = of[:2]
        if len(self._kept) > _MOST_ROWS:
            self._kept = {name: one for name, one in self._kept.items() if one.held}
        one = _Rate(key) if kind == RATE else self._hold(kind, key)
        self._kept[kind, key] = one
        return one

    def _hold(self, kind: str, key: str) -> _Hold:
        hold = _Hold(self._row(kind, key, self.process), Row(f"{kind}:{key}") if kind == MONEY else None)
        hold.others = self._others(kind, key)
        return hold

    def _others(self, kind: str, key: str) -> Sequence[Row]:
        return [self._row(kind, key, one) for one in self._alive if one != self.process]

    def _row(self, kind: str, key: str, process: bytes) -> Row:
        return Row(f"{kind}:{key}:{process.hex()}")

    def _live(self, table: Table, now: float) -> None:
        """Say that this process lives, and look who else does."""
        self._seen = now
        table.see(self.process, now, now - 4 * LEASE)
        living = [process for process, seen in table.processes().items() if now - LEASE < seen <= now + 1]
        if living != self._alive:
            self._alive = living
            for (kind, key), one in self._kept.items():
                if isinstance(one, _Hold):
                    one.others = self._others(kind, key)
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
