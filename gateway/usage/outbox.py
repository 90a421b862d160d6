"""The usage outbox: an SQLite file of events that the ledger has not confirmed yet.

Each gateway process has a file of its own.

Events are added in batches. Each batch is one transaction, which does not wait for the disk: SQLite
hands its write-ahead log (WAL) to the operating system, so a killed process loses nothing.
`checkpoint` writes the log to the disk in another thread; a power failure loses the events after
the last checkpoint.

`place` numbers the rows in the order in which they were added, and no number is used twice in a
file. Delivery reads in the order of `place`: event ids are not in the order of arrival, and SQLite
reuses row ids when a table has become empty.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from llmops.gateway.interfaces import TENANT_PREFIX, UsageEvent
from llmops.gateway.usage.event_formats import EncodedEvent, decode_event
from llmops.gateway.usage.outbox_folders import keep_damaged

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Size in bytes up to which an outbox without a limit may grow, as that of a dead gateway: even if it
#: is full, it gets the events of its slots.
MAX_BYTES = 2**42
#: Size in bytes at which the log is emptied on the event loop. The log grows to this size only if
#: events arrive faster than checkpoints end.
MAX_LOG_BYTES = 16 * 2**20
#: Size in bytes above which an empty file is shrunk: a long outage may have left a gigabyte.
SHRINK_BYTES = 4 * 2**20
#: Maximum number of damaged events of one outbox that get their own line in the log.
MAX_DAMAGE_LINES = 10
#: Minimum of the file's page limit; SQLite does not open a smaller file.
_MIN_PAGES = 16
#: Seconds that a statement waits for the writer's lock, for which only the end of a checkpoint
#: competes.
_LOCK_TIMEOUT = 1.0
_DATABASE, _POSITION = "outbox.db", "position"
#: The database, and the files that SQLite creates beside it.
SQLITE_FILES = (_DATABASE, *(f"{_DATABASE}-{kind}" for kind in ("shm", "wal", "journal")))
#: Indices of the numbers in the position file, and its size in bytes: the last place given to an
#: event, the number of events, the number of the last transaction, and the two numbers of
#: `UsageOutbox.answers`.
_LAST, _COUNT, _TRANSACTION, _ANSWERS, _POSITION_BYTES = 0, 1, 2, 3, 40
#: Indices of the numbers in `UsageOutbox.answers`.
ANSWERS_MARK, ANSWERS_COUNT = 0, 1
_MAX_PLACE = 2**53
#: SQLite errors of the machine, after which the file may be intact. Every other SQLite error at
#: opening a file means that the file is damaged.
_MACHINE_ERRORS = frozenset(
    {
        sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN,
    }
)  # fmt: skip
#: Decoder that replaces invalid bytes, so that `decode_event` notices a damaged id. The default
#: decoder would make the whole read fail.
_TEXT = partial(str, encoding="utf-8", errors="replace")
_COLUMNS = "place, id, checksum, body"
#: Fields of an event that tell whose budget pays for it.
_BILLED = ("key_id", "tenant_id", "at", "cost_micros")


class OutboxRow(NamedTuple):
    """An event and its place in the outbox."""

    place: int
    event: UsageEvent


class UsageOutbox:
    """An outbox in a folder that no other process uses.

    `add` and `delete` run in the event loop's thread; `read`, `ids` and `checkpoint` work in a
    thread of their own.

    Attributes:
        answers: Two numbers of the file of open answers: its mark, and how many slots are used.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        """Open the outbox of `folder`, or create it. Every page of an existing file is checked.

        Raises:
            OSError: A file cannot be created or opened.
            sqlite3.Error: The database is damaged, or the machine lacks something: see
                `is_machine_error`.
        """
        path = folder / _DATABASE
        self._path, self._log_path, is_new = path, folder / f"{_DATABASE}-wal", not path.exists()
        self._connections: list[sqlite3.Connection] = []
        self._thread = ThreadPoolExecutor(1, "usage-outbox")
        #: The number of events in the file.
        self.count: int
        #: Places of unreadable rows. These rows are not delivered, and stay in the file.
        self.damaged: set[int] = set()
        try:
            self._writer = self._connect(path)
            if is_new:
                self._writer.execute(
                    "CREATE TABLE events "
                    "(place INTEGER PRIMARY KEY, id TEXT NOT NULL, checksum INTEGER NOT NULL, body BLOB NOT NULL)"
                )
                # Created after the table, so that a file without a table counts as damaged and not
                # as new.
                self._writer.execute("PRAGMA journal_mode = WAL")
            else:
                self._check()
            self.limit(max_bytes)
            self._reader = self._connect(path)
            # Read something first: a new connection that has read nothing does not know the log,
            # and its checkpoint does nothing.
            for connection in self._connections:
                self.count, last = connection.execute("SELECT count(*), coalesce(max(place), 0) FROM events").fetchone()
            self._position, had_position = _map_position(folder / _POSITION)
            self.answers = self._position[_ANSWERS:]
            self._recover_position(last, is_new or had_position)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Return the size of the pages that hold events, in bytes."""
        pages, free, size = (
            self._writer.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def limit(self, max_bytes: int) -> None:
        """Set the maximum size in bytes. Events that do not fit are refused."""
        self._max_log_bytes = min(MAX_LOG_BYTES, max_bytes // 8)
        (page_size,) = self._writer.execute("PRAGMA page_size").fetchone()
        pages = max((max_bytes - self._max_log_bytes) // page_size, _MIN_PAGES)
        self._writer.execute(f"PRAGMA max_page_count = {pages}")

    def add(self, events: Sequence[EncodedEvent]) -> None:
        """Add all of the events at the end of the outbox, or none of them.

        Raises:
            sqlite3.Error: The events do not fit, or the disk fails.
        """
        rows = [(place, *event) for place, event in enumerate(events, self.last_place + 1)]
        with self._writer:
            self._writer.executemany(f"INSERT INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?)", rows)
            self._number_transaction()
        self.count += len(events)
        self.last_place += len(events)
        self._note_position(self._transaction + 1)

    def skip(self, count: int) -> None:
        """Give the next `count` places to events that are never added."""
        self.last_place += count
        self._note_position(self._transaction)

    def delete(self, places: Collection[int]) -> None:
        """Delete the events at these places.

        Raises:
            sqlite3.Error: The disk fails.
        """
        with self._writer:
            deleted = self._writer.execute(
                "DELETE FROM events WHERE place IN (SELECT value FROM json_each(?))", (json.dumps(sorted(places)),)
            )
            self._number_transaction()
        self.count -= deleted.rowcount
        self._note_position(self._transaction + 1)

    async def read(self, after: int, limit: int) -> list[OutboxRow]:
        """Return the first events after the place `after`, at most `limit`.

        Damaged rows are skipped.
        """
        return await self._in_thread(self._read, after, limit)

    async def ids(self, until: int, limit: int) -> dict[str, int]:
        """Return the places of the first events, keyed by event id.

        At most `limit` events up to the place `until` are returned.
        """
        statement = "SELECT id, place FROM events WHERE place <= ? ORDER BY place LIMIT ?"
        rows = await self._in_thread(_fetch, self._reader, statement, (until, limit + len(self.damaged)))
        return dict([row for row in rows if row[1] not in self.damaged][:limit])

    def known(self, ids: Collection[str]) -> set[str]:
        """Return the ids among `ids` whose events are in the outbox. Reads the whole outbox."""
        statement = "SELECT id FROM events WHERE id IN (SELECT value FROM json_each(?))"
        return {row[0] for row in self._writer.execute(statement, (json.dumps(sorted(ids)),))}

    def costs(self) -> Counter[tuple[str, str]]:
        """Return the cost of all events in micro-dollars by budget, as in `Quota.of`, and day (UTC)."""
        key, tenant, at, cost = (f"json_extract(body, '$[{UsageEvent._fields.index(name)}]')" for name in _BILLED)
        bodies = "(SELECT CAST(body AS TEXT) AS body FROM events)"
        sums = f"SELECT {key}, {tenant}, date({at}), sum({cost}) FROM {bodies} WHERE json_valid(body) GROUP BY 1, 2, 3"
        found: Counter[tuple[str, str]] = Counter()
        for key_id, tenant_id, day, micros in self._reader.execute(sums):
            found.update({(str(key_id), str(day)): micros or 0, (f"{TENANT_PREFIX}{tenant_id}", str(day)): micros or 0})
        return found

    def oldest(self) -> datetime | None:
        """Return the time of the first event; None without events, or if the event is unreadable."""
        try:
            row = self._writer.execute(f"SELECT {_COLUMNS} FROM events ORDER BY place LIMIT 1").fetchone()
            return decode_event(EncodedEvent(*row[1:])).at if row else None
        except (sqlite3.Error, ValueError):
            return None

    async def checkpoint(self) -> None:
        """Write all events that were added before this call to the disk.

        Raises:
            sqlite3.Error: The disk fails.
        """
        await self._in_thread(_fetch, self._reader, "PRAGMA wal_checkpoint(PASSIVE)")
        if self._log_path.stat().st_size > self._max_log_bytes:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not self.count and self._path.stat().st_size > SHRINK_BYTES:
            self._writer.execute("VACUUM")

    def close(self) -> None:
        """Wait for a running read or checkpoint, and close the files."""
        self._thread.shutdown(cancel_futures=True)
        for connection in self._connections:
            connection.close()

    async def _in_thread(self, work: Callable[..., Result], *args: Any) -> Result:
        """Run `work` in the thread of the second connection.

        Cancelling the caller does not end the work: `close` waits for it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _connect(self, path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=_LOCK_TIMEOUT, isolation_level="IMMEDIATE", check_same_thread=False)
        self._connections.append(connection)
        connection.text_factory = _TEXT
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        return connection

    def _check(self) -> None:
        (state,) = self._writer.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state.splitlines()[-1])

    def _number_transaction(self) -> None:
        """Write the number of the running transaction to the database.

        The position file gets the number afterwards: if the database has a lower number, its
        files are older.
        """
        self._writer.execute(f"PRAGMA user_version = {self._transaction + 1}")

    def _note_position(self, transaction: int) -> None:
        """Write the state after this transaction to the position file, its number last."""
        self._position[_LAST], self._position[_COUNT] = self.last_place, self.count
        self._position[_TRANSACTION] = self._transaction = transaction

    def _recover_position(self, last: int, had_position: bool) -> None:
        """Compare the events in the file with the position that the file's last process wrote.

        Missing events are reported: SQLite silently ends a log at the first incomplete frame, and
        reads a file or log that is older than the other.

        Args:
            last: The place of the last event in the file.
            had_position: False if the file's last process left no whole position.
        """
        (in_file,) = self._writer.execute("PRAGMA user_version").fetchone()
        written, count, transaction, _, answers = self._position
        is_whole = 0 <= count <= written <= _MAX_PLACE and transaction >= 0 and answers >= 0
        # A process may die between its first transaction and the first write of the position.
        if not (is_whole and had_position) or (transaction == 0 and in_file > 1):
            log.error(
                "The file %s is lost or damaged, so the gateway cannot tell whether usage events are missing from the "
                "outbox. Check the machine's disk.",
                _POSITION,
            )
            self.answers[ANSWERS_COUNT] = written = transaction = 0
        missing = 0
        if 0 < transaction >= in_file:
            # Of the events behind the file's last one, the ledger has all but `count`.
            missing = max(count - self.count, min(count, written - last) if transaction > in_file else 0)
        if missing > 0:
            # Copy the log first: SQLite deletes it when the file is closed.
            kept = f" Its log is kept in {keep_damaged(self._log_path)}." if self._log_path.is_file() else ""
            log.error(
                "A part of the outbox %s is lost: up to %d usage events are missing and not billed. If the machine "
                "did not crash, check its disk.%s",
                self._path, missing, kept,
            )  # fmt: skip
        self.last_place = max(written, last)
        self._note_position(in_file)

    def _read(self, after: int, limit: int) -> list[OutboxRow]:
        statement = f"SELECT {_COLUMNS} FROM events WHERE place > ? ORDER BY place LIMIT ?"
        while rows := _fetch(self._reader, statement, (after, limit)):
            readable = []
            for place, *encoded in rows:
                try:
                    readable.append(OutboxRow(place, decode_event(EncodedEvent(*encoded))))
                except (ValueError, TypeError) as error:
                    self._report_damage(place, error)
            if readable:
                return readable
            after = rows[-1][0]
        return []

    def _report_damage(self, place: int, error: Exception) -> None:
        if place not in self.damaged:
            self.damaged.add(place)
            if len(self.damaged) <= MAX_DAMAGE_LINES:
                log.error(
                    "Event %d of the outbox %s is damaged (%s) and cannot be billed; the file keeps it.",
                    place,
                    self._path,
                    error,
                )
            if len(self.damaged) == MAX_DAMAGE_LINES:
                log.error("More damaged events of this outbox are only counted.")


def is_machine_error(error: Exception) -> bool:
    """Return True if an SQLite error says that the machine lacks space, permissions or memory.

    The database file may be intact despite such an error.
    """
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _MACHINE_ERRORS


def salvage_events(folder: Path) -> Iterator[EncodedEvent]:
    """Yield the readable events of a damaged outbox.

    The events are read from the start and from the end of the file, each up to the damage.
    """
    last = 0
    for condition in ("place > ? ORDER BY place", "place > ? ORDER BY place DESC"):
        try:
            with closing(sqlite3.connect(folder / _DATABASE)) as connection:
                connection.text_factory = _TEXT
                for place, *values in connection.execute(f"SELECT {_COLUMNS} FROM events WHERE {condition}", (last,)):
                    encoded = EncodedEvent(*values)
                    try:
                        decode_event(encoded)
                    except (ValueError, TypeError):
                        continue
                    if condition.endswith("place"):
                        last = max(last, place)
                    yield encoded
        except sqlite3.Error:
            continue


def _fetch(connection: sqlite3.Connection, statement: str, values: tuple[int, ...] = ()) -> list[tuple]:
    return connection.execute(statement, values).fetchall()


def _map_position(path: Path) -> tuple[memoryview[int], bool]:
    """Map the position file into memory, so that its numbers survive a killed process.

    Return False with it if the file was missing or cut.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        was_whole = os.fstat(file).st_size == _POSITION_BYTES
        os.ftruncate(file, _POSITION_BYTES)
        os.posix_fallocate(file, 0, _POSITION_BYTES)
        return memoryview(mmap.mmap(file, _POSITION_BYTES)).cast("q"), was_whole
    finally:
        os.close(file)
