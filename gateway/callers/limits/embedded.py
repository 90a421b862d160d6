"""Limits of one machine: a SQLite file in memory, for any number of workers and gateways, that outlives them all.

WAL without syncs: what is lost when the machine goes is at most a minute's refill. Time is the system's monotonic
clock, which all of its processes share and nobody sets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from llmops.gateway.callers.limits.base import LEASE, Limiter, Reserved
from llmops.gateway.callers.limits.buckets import MONEY, RATE, Bucket, Change, Decision, Want, decide

log = logging.getLogger(__name__)
T = TypeVar("T")

# seconds for which what was settled waits for a reservation to go with
SETTLED = 0.02

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rates (key TEXT PRIMARY KEY, level REAL NOT NULL, stamp REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS holds (key TEXT, process TEXT, amount INTEGER NOT NULL, PRIMARY KEY (key, process))
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (key TEXT PRIMARY KEY, amount INTEGER NOT NULL, stamp REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS processes (id TEXT PRIMARY KEY, seen REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS machine (id TEXT NOT NULL);
"""
_RATE = "SELECT level, stamp FROM rates WHERE key = ?"
_SET_RATE = "INSERT INTO rates VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET level = ?2, stamp = ?3"
_HELD = (
    "SELECT coalesce(sum(amount), 0) FROM holds JOIN processes ON processes.id = holds.process "
    "WHERE holds.key = ? AND seen > ?"
)
_HOLD = (
    "INSERT INTO holds VALUES (?, ?, max(?3, 0)) ON CONFLICT (key, process) DO UPDATE SET amount = max(amount + ?3, 0)"
)
_SPENT = "SELECT amount FROM spent WHERE key = ?"
_SPEND = "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET amount = amount + ?2, stamp = ?3"
_SPENT_AT_LEAST = "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET amount = max(amount, ?2)"
_SEEN = "INSERT INTO processes VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET seen = ?2"

# Seconds for which others may hold the file: a reservation takes some 0.00003, unless its process loses its turn.
# SQLite's own waiting begins with a whole millisecond.
PATIENCE, _NAP = 0.05, 0.0001
# Seconds: what is older than this is full, or of a period that is over.
_FULL, _OVER = 120.0, 40 * 86_400.0
_MEMORY, _LONG_AGO = ":memory:", float("-inf")
# that wait for a file which cannot be used
_MOST_CHANGES = 10_000


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
        self.process = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._seen = self._swept = _LONG_AGO
        self._spare: Embedded | None = None
        self._broken_until = 0.0
        self._changes: list[Change] = []
        self._timer: asyncio.TimerHandle | None = None
        self._file: sqlite3.Connection | None = None

    @property
    def machine(self) -> str:
        """The same for all who share the file."""
        if self._ready():
            assert self._file is not None
            return str(self._file.execute("SELECT id FROM machine").fetchone()[0])
        return self.process

    async def reserve(self, wants: Sequence[Want]) -> Reserved:
        return self.reserve_now(wants)

    def reserve_now(self, wants: Sequence[Want]) -> Reserved:
        decision = self._write(lambda file, now: self._reserve(file, wants, now))
        return Reserved(decision, wants, self) if decision is not None else self._own().reserve_now(wants)

    def settle(self, changes: Sequence[Change]) -> None:
        """With the next reservation, or in `SETTLED` seconds: a transaction costs more than what is in it."""
        self._changes += changes
        if self._timer is None:
            try:
                self._timer = asyncio.get_running_loop().call_later(SETTLED, self._settle_now)
            except RuntimeError:
                self._settle_now()

    def spent(self, key: str, at_least: int) -> None:
        self._write(lambda file, now: file.execute(_SPENT_AT_LEAST, (key, at_least, now)))

    def beat(self) -> None:
        self._seen = _LONG_AGO
        self._write(self._tidy)

    async def close(self) -> None:
        self._settle_now()
        gone = "DELETE FROM holds WHERE process = ?", "DELETE FROM processes WHERE id = ?"
        self._write(lambda file, now: [file.execute(one, (self.process,)) for one in gone])
        if self._file is not None:
            self._file.close()
        self._file, self._broken_until = None, float("inf")

    # -- what is kept ----------------------------------------------------------------------------------------------

    def _reserve(self, file: sqlite3.Connection, wants: Sequence[Want], now: float) -> Decision:
        self._live(file, now)
        rates, changed = self._settled(file, now)
        left: list[float] = []
        for want in wants:
            if want.kind == RATE:
                bucket = rates[want.key] = self._rate(file, want, rates, now)
                left.append(bucket.level)
            else:
                left.append(self._room(file, want, now))
        decision = decide(wants, left)
        for want, given in zip(wants, decision.given, strict=False):
            if want.kind == RATE:
                rates[want.key] = rates[want.key].less(given, want.limit)
                changed.add(want.key)
            else:
                file.execute(_HOLD, (_hold(want), self.process, given))
        self._keep(file, rates, changed)
        return decision

    def _settled(self, file: sqlite3.Connection, now: float) -> tuple[dict[str, Bucket], set[str]]:
        """The rates after all changes that wait, and which of them are to be written."""
        rates: dict[str, Bucket] = {}
        for change in self._changes:
            if change.kind == RATE:
                rates[change.key] = self._rate(file, change, rates, now).less(change.used, change.limit)
                continue
            file.execute(_HOLD, (_hold(change), self.process, -change.held))
            if change.used:
                file.execute(_SPEND, (change.key, change.used, now))
        self._changes = []
        return rates, set(rates)

    def _settle_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._changes:
            self._write(lambda file, now: self._keep(file, *self._settled(file, now)))

    def _keep(self, file: sqlite3.Connection, rates: Mapping[str, Bucket], changed: Iterable[str]) -> None:
        for key in changed:
            file.execute(_SET_RATE, (key, *rates[key]))

    def _rate(self, file: sqlite3.Connection, want: Want | Change, rates: Mapping[str, Bucket], now: float) -> Bucket:
        if want.key in rates:
            return rates[want.key]
        row = file.execute(_RATE, (want.key,)).fetchone()
        return Bucket(*row).at(now, want.limit) if row else Bucket(want.limit, now)

    def _room(self, file: sqlite3.Connection, want: Want, now: float) -> float:
        (held,) = file.execute(_HELD, (_hold(want), now - LEASE)).fetchone()
        row = file.execute(_SPENT, (want.key,)).fetchone() if want.kind == MONEY else None
        return float(want.limit - held - (row[0] if row else 0))

    def _live(self, file: sqlite3.Connection, now: float) -> None:
        if now < self._seen + 1 and now >= self._seen:
            return
        self._seen = now
        file.execute(_SEEN, (self.process, now))

    def _tidy(self, file: sqlite3.Connection, now: float) -> None:
        self._live(file, now)
        if now - self._swept > _FULL or now < self._swept:
            self._sweep(file, now)

    # -- the file --------------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        if self._file is not None and not self._broken_until:
            return True
        if self._clock() < self._broken_until:
            return False
        try:
            self._open()
        except (sqlite3.Error, OSError) as error:
            self._break(error)
            return False
        return True

    def _open(self) -> None:
        """A file of an earlier start of the system has times that mean nothing now: it begins anew."""
        self._file = file = sqlite3.connect(self._path, isolation_level=None, timeout=0)
        # opening may meet another one who opens: that takes longer than a reservation
        file.execute("PRAGMA busy_timeout = 1000")
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = off")
        file.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";"):
            file.execute(statement)
        file.execute("INSERT INTO machine SELECT ? WHERE NOT EXISTS (SELECT 1 FROM machine)", (secrets.token_hex(8),))
        self._sweep(file, self._clock())
        file.execute("COMMIT")
        file.execute("PRAGMA busy_timeout = 0")
        self._broken_until, self._seen = 0.0, _LONG_AGO

    def _sweep(self, file: sqlite3.Connection, now: float) -> None:
        self._swept = now
        file.execute("DELETE FROM rates WHERE stamp < ? AND level >= 0 OR stamp > ?", (now - _FULL, now + 1))
        file.execute("DELETE FROM spent WHERE stamp < ?", (now - _OVER,))
        file.execute("DELETE FROM processes WHERE seen < ? OR seen > ?", (now - 4 * LEASE, now + 1))
        file.execute("DELETE FROM holds WHERE amount = 0 OR process NOT IN (SELECT id FROM processes)")

    def _write(self, write: Callable[[sqlite3.Connection, float], T]) -> T | None:
        """What `write` gives, in a transaction; None where the file cannot be used."""
        if not self._ready():
            return None
        assert self._file is not None
        waiting = self._changes
        try:
            _begin(self._file, self._patience)
            # now: the times are in the order in which they come
            made = write(self._file, self._clock())
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            self._changes = waiting[-_MOST_CHANGES:]
            self._break(error)
            return None
        return made

    def _break(self, error: Exception) -> None:
        if not self._broken_until:
            log.error("The limits in %s cannot be used (%s); this worker counts for itself.", self._path, error)
        self._broken_until = self._clock() + 1.0
        if self._file is not None:
            self._file.close()  # whatever was begun is undone
            self._file = None

    def _own(self) -> Embedded:
        if self._spare is None:
            self._spare = Embedded(_MEMORY, self._clock)
        return self._spare


def _begin(file: sqlite3.Connection, patience: float) -> None:
    """Raises sqlite3.OperationalError when others hold the file for too long."""
    until = 0.0
    while True:
        try:
            file.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            until = until or time.monotonic() + patience
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(_NAP)
        else:
            return


def _hold(of: Want | Change) -> str:
    return f"{of.kind}:{of.key}"
