"""An open database: its connections for reading and for writing."""

import asyncio
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import asyncpg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from llmops.errors import MissingDependencyError, ResourceError
from llmops.store.errors import keep_cancellation, translate_database_errors
from llmops.store.ledger_mark import is_older_than_log, read_mark, write_mark
from llmops.store.store_url import StoreUrl

log = logging.getLogger(__name__)

#: Minimum version of SQLite, the first with INSERT … RETURNING.
MIN_SQLITE_VERSION = (3, 35)
BUSY_TIMEOUT = 10.0
CONNECT_TIMEOUT = 10.0
#: Maximum seconds to close a connection, because a server that hangs does not confirm it.
CLOSE_TIMEOUT = 1.0
#: Maximum number of connections beyond the pool, for bursts. They are opened while all others are
#: in use and closed after use.
MAX_OVERFLOW = 10
#: Maximum number of times that a connection tries to switch a new file to the write-ahead log.
_WAL_ATTEMPTS = 5
#: Maximum value of SQLite's `user_version`, in which the store numbers transactions of usage.
_MAX_USER_VERSION = 2**31 - 1
_WRITES = "llmops_writes"
_FILE_IDS = "llmops_file_ids"
#: PostgreSQL sends times as microseconds since then, and infinity as the last or first number.
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_INFINITIES = {
    b"\x7f" + b"\xff" * 7: datetime.max.replace(tzinfo=UTC),
    b"\x80" + b"\0" * 7: datetime.min.replace(tzinfo=UTC),
}
_FileId = tuple[int, int]
ResultT = TypeVar("ResultT")


class Store:
    """A database. Queries get a connection as an argument, so that several can share a transaction."""

    def __init__(self, location: StoreUrl, engine: AsyncEngine, alone: Engine | None = None) -> None:
        """Create a store from its engines. Use `connect` to make both.

        Args:
            location: Location of the database.
            engine: The asynchronous engine of all connections.
            alone: A synchronous engine for `transact` on SQLite, None for PostgreSQL.
        """
        self.location, self._alone = location, alone
        # A single statement is consistent in PostgreSQL without a transaction, which would cost two
        # round trips. Behind a PgBouncer, preparing and executing a statement needs the same
        # connection and hence a transaction.
        alike = location.file is None and not location.pooled
        self._reading = engine.execution_options(isolation_level="AUTOCOMMIT") if alike else engine
        self._writing = engine.execution_options(**{_WRITES: True})
        # SQLite lets one connection write, and makes other writers poll. With a lock, the other
        # writers wait in a queue instead.
        self._turn: AbstractAsyncContextManager[None] = asyncio.Lock() if location.file else nullcontext()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection for queries.

        Raises:
            InputError: The store's URL, user or password is wrong.
            ResourceError: The database cannot be reached or does not work.
        """
        with keep_cancellation(), translate_database_errors(self.location):
            async with self._reading.connect() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction for writing.

        The transaction is committed at the end of the block and rolled back if the block raises.

        Raises the errors of `read`. Transactions cannot be nested.
        """
        with keep_cancellation(), translate_database_errors(self.location):
            async with self._turn, self._writing.begin() as connection:
                yield connection

    async def transact(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """Run `work`, which executes many statements, in a transaction. Return its result.

        SQLite's async driver switches threads for every statement. Here, all of `work` runs in one
        thread.
        """
        if self._alone is None:
            async with self.write() as connection:
                return await connection.run_sync(work)
        with translate_database_errors(self.location):
            async with self._turn:
                return await asyncio.to_thread(_transacted, self._alone, Path(str(self.location.file)), work)

    async def close(self) -> None:
        if self._alone is not None:
            await asyncio.to_thread(self._alone.dispose)
        await self._reading.dispose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def connect(
    location: StoreUrl, pool_size: int = 5, busy_seconds: float = BUSY_TIMEOUT, max_overflow: int = MAX_OVERFLOW
) -> Store:
    """Return a store for the database, without opening a connection yet.

    Args:
        location: Location of the database.
        pool_size: Number of connections that stay open.
        busy_seconds: Seconds for which a SQLite writer waits for another writer.
        max_overflow: Number of further connections while all others are in use.
    """
    pool = {"pool_size": pool_size, "max_overflow": max_overflow}
    if location.file is None:
        return Store(location, _postgres_engine(location, pool))
    return Store(location, *_sqlite_engines(location, pool, busy_seconds))


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """A connection that closes in bounded time, even if the server hangs."""

    async def close(self, *, timeout: float | None = CLOSE_TIMEOUT) -> None:
        with suppress(asyncio.TimeoutError):
            await super().close(timeout=timeout)


def _postgres_engine(location: StoreUrl, pool: dict[str, int]) -> AsyncEngine:
    options = {"timeout": CONNECT_TIMEOUT, "connection_class": _Connection}
    with translate_database_errors(location):
        engine = create_async_engine(location.url, connect_args=options, json_deserializer=_decode_json, **pool)
    event.listen(engine.sync_engine, "connect", _set_time_codec)
    event.listen(engine.sync_engine, "checkout", _discard_closed_connection)
    return engine


def _set_time_codec(connection: Any, _: object) -> None:
    """Let a time that Python cannot hold be only a damaged value of its row."""
    codec = {"encoder": _encode_time, "decoder": _decode_time, "schema": "pg_catalog", "format": "binary"}
    connection.run_async(lambda driver: driver.set_type_codec("timestamptz", **codec))


def _encode_time(value: datetime) -> bytes:
    return ((value - _EPOCH) // timedelta(microseconds=1)).to_bytes(8, "big", signed=True)


def _decode_time(value: bytes) -> datetime | bytes:
    """Return a time, or its bytes if it is before the year 1 or after 9999.

    Infinity is the last or first time.
    """
    if value in _INFINITIES:
        return _INFINITIES[value]
    try:
        return _EPOCH + timedelta(microseconds=int.from_bytes(value, "big", signed=True))
    except OverflowError:
        return value


def _decode_json(text: str) -> Any:
    """Return a value, or the bytes of its text if it is too deep or a number has too many digits."""
    try:
        return _load_json(text)
    except (ValueError, RecursionError):
        return text.encode()


def _load_json(text: str) -> Any:
    """Return a value. Halves of surrogate pairs are replaced, because UTF-8 cannot encode them."""
    value = json.loads(text)
    if "\\ud" in str(text).lower():
        return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def _discard_closed_connection(_: object, record: ConnectionPoolEntry, __: object) -> None:
    """Discard a connection that the server has closed.

    The driver knows the state of the connection without a round trip to the server, which
    `pool_pre_ping` would cost for each use.
    """
    driver = record.driver_connection
    if driver is not None and driver.is_closed():
        raise DisconnectionError


def _sqlite_engines(location: StoreUrl, pool: dict[str, int], busy_seconds: float) -> tuple[AsyncEngine, Engine]:
    if sqlite3.sqlite_version_info < MIN_SQLITE_VERSION:
        raise MissingDependencyError(
            f"This Python has SQLite {sqlite3.sqlite_version}, and a store needs 3.35 or later; use another Python, or "
            "PostgreSQL."
        )
    # Python's driver begins transactions late and commits before DDL. isolation_level None turns
    # that off, and the transactions are begun here.
    options = {"isolation_level": None, "timeout": busy_seconds, "factory": _SqliteConnection}
    engine = create_async_engine(location.url, connect_args=options, json_deserializer=_load_json, **pool)
    url = location.url.set(drivername="sqlite")
    alone = create_engine(
        url, pool_size=1, connect_args=options, json_deserializer=_load_json, execution_options={_WRITES: True}
    )
    file = _SqliteFile(Path(str(location.file)))
    for one in (engine.sync_engine, alone):
        event.listen(one, "do_connect", file.check_log)
        event.listen(one, "connect", file.set_up)
        event.listen(one, "checkout", file.discard_if_replaced)
        event.listen(one, "begin", _begin)
    return engine, alone


class _SqliteConnection(sqlite3.Connection):
    """A connection for which text that is not UTF-8 is only a damaged value of its row.

    Python's driver would raise an error for the whole result.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.text_factory = _text


def _text(value: bytes) -> str | bytes:
    """Return a text, or its bytes if they are not UTF-8, as for a blob in a column of text."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


class _SqliteFile:
    """The file of a store and its write-ahead log, which a restored backup may replace.

    A connection to the old files still works, but everything that it writes is lost.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._log = path, Path(f"{path}-wal")
        # the identities of the file and its log at the last connection
        self._known: tuple[_FileId | None, _FileId | None] = None, None

    def check_log(self, *_: object) -> None:
        """Raise ResourceError if a connection would write an old file's log into a new file."""
        if self._known[0] is None:
            is_replaced = is_older_than_log(self._path, self._log)
        else:
            is_replaced = self._log.exists() and self._known[1] == _file_id(self._log)
            is_replaced = is_replaced and self._known[0] != _file_id(self._path)
        if is_replaced:
            raise ResourceError(
                f"The store {self._path} was replaced beside the write-ahead log of the old file, which would damage "
                f"the new one; remove {self._log} and {self._path}-shm."
            )

    def set_up(self, connection: Any, record: ConnectionPoolEntry) -> None:
        try:
            mark = read_mark(self._path)
            _set_up(connection)
            self._report_loss(connection, mark)
            found = record.info[_FILE_IDS] = self._ids()
            if self._known[0] not in (None, found[0]):
                log.error("The store %s was replaced by another file, which is used from now on.", self._path)
            self._known = found
        except BaseException:
            # SQLAlchemy does not close a connection that fails here, and the connection's thread
            # would keep the process from ending.
            connection.close()
            raise

    def _report_loss(self, connection: Any, mark: int) -> None:
        """Report usage that the database lacks although a process has written it.

        `mark` is the number that `read_mark` returned before the connection read the database.
        """
        cursor = connection.cursor()
        cursor.execute("PRAGMA user_version")
        (number,) = cursor.fetchone()
        cursor.close()
        if number < mark:
            log.error(
                "The store %s is older than the last usage that was written to it: %d transactions of usage are lost "
                "and not billed. `llmops usage reconcile` lists events of gateways that still run.",
                *(self._path, mark - number),
            )
            write_mark(self._path, number)

    def discard_if_replaced(self, _: object, record: ConnectionPoolEntry, __: object) -> None:
        if record.info[_FILE_IDS] != self._ids():
            raise DisconnectionError

    def _ids(self) -> tuple[_FileId, _FileId | None]:
        return _file_id(self._path), _file_id(self._log) if self._log.exists() else None


def _file_id(file: Path) -> _FileId:
    """Return the device and inode of a file.

    Raises:
        ResourceError: The file was removed, or its folder cannot be read.
    """
    try:
        found = file.stat()
    except OSError as error:
        raise ResourceError(
            f"{file} of the store cannot be found ({error.strerror}); restore the store from a backup."
        ) from None
    return found.st_dev, found.st_ino


def _begin(connection: Connection) -> None:
    # IMMEDIATE, because a transaction that reads before it writes fails if another transaction
    # wrote in between, instead of waiting.
    immediate = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _transacted(engine: Engine, file: Path, work: Callable[[Connection], ResultT]) -> ResultT:
    with engine.begin() as connection:
        result = work(connection)
        number = connection.exec_driver_sql("PRAGMA user_version").scalar_one() + 1 & _MAX_USER_VERSION
        connection.exec_driver_sql(f"PRAGMA user_version = {number}")
    write_mark(file, number)
    return result


def _set_up(connection: Any) -> None:
    cursor = connection.cursor()
    # With a write-ahead log, readers and the writer do not wait for each other. SQLite waits for a
    # writer, but not for a process that switches a new file to the log at the same time.
    for attempt in range(_WAL_ATTEMPTS):
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError:
            if attempt + 1 == _WAL_ATTEMPTS:
                raise
            cursor.execute("BEGIN IMMEDIATE")
            cursor.execute("ROLLBACK")
    cursor.execute("PRAGMA foreign_keys = ON")
    # A gateway deletes its copy of an event once the ledger has it, so each commit must be on the
    # disk.
    cursor.execute("PRAGMA synchronous = FULL")
    # the first read opens the write-ahead log
    cursor.execute("PRAGMA schema_version")
    cursor.close()
