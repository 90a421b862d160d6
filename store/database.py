"""An open database: connections for reading and for writing."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any, Self, TypeVar

import asyncpg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from llmops.errors import MissingDependencyError
from llmops.store.errors import translate_database_errors
from llmops.store.store_url import StoreUrl

#: The first SQLite with INSERT … RETURNING.
MIN_SQLITE_VERSION = (3, 35)
BUSY_TIMEOUT = 10.0
CONNECT_TIMEOUT = 10.0
#: Seconds for closing a connection: a server that hangs does not confirm it.
CLOSE_TIMEOUT = 1.0
#: Connections that a store opens beyond its pool while all of that are in use, and closes afterwards.
MAX_OVERFLOW = 10
_WRITES = "llmops_writes"
ResultT = TypeVar("ResultT")


class Store:
    """A database. Queries get a connection as an argument, so that several can share a transaction."""

    def __init__(self, location: StoreUrl, engine: AsyncEngine, alone: Engine | None = None) -> None:
        """Create a store from its engines; `connect` makes the engines.

        Args:
            location: Location of the database.
            engine: The engine of all connections.
            alone: A synchronous engine for `transact` on SQLite.
        """
        self.location, self._alone = location, alone
        # In PostgreSQL a single statement is consistent by itself, so reads need no transaction,
        # which would cost two round trips. Behind a PgBouncer a statement must be prepared and
        # executed on one connection.
        alike = location.file is None and not location.pooled
        self._reading = engine.execution_options(isolation_level="AUTOCOMMIT") if alike else engine
        self._writing = engine.execution_options(**{_WRITES: True})
        # SQLite has one writer and makes others poll for it: here they wait in a queue instead
        self._turn: AbstractAsyncContextManager[None] = asyncio.Lock() if location.file else nullcontext()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Connect for queries. Raises InputError or ResourceError if the database cannot be used."""
        with translate_database_errors(self.location):
            async with self._reading.connect() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction for writing.

        It is committed at the end of the block and rolled back if the block raises.

        Raises the errors of `read`. Transactions cannot be nested.
        """
        with translate_database_errors(self.location):
            async with self._turn, self._writing.begin() as connection:
                yield connection

    async def transact(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """Do work of many statements in a transaction, and return its result.

        SQLite's async driver would switch threads for every statement; here all of `work` runs in
        one thread.
        """
        if self._alone is None:
            async with self.write() as connection:
                return await connection.run_sync(work)
        with translate_database_errors(self.location):
            async with self._turn:
                return await asyncio.to_thread(_transacted, self._alone, work)

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
    """Return the database as it is, without opening a connection yet.

    Args:
        location: Location of the database.
        pool_size: Number of connections that stay open.
        busy_seconds: Seconds for which a SQLite writer waits for another one.
        max_overflow: Number of further connections while all others are in use.
    """
    pool = {"pool_size": pool_size, "max_overflow": max_overflow}
    if location.file is None:
        return Store(location, _postgres_engine(location, pool))
    return Store(location, *_sqlite_engines(location, pool, busy_seconds))


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """A connection with a bounded close: SQLAlchemy would wait forever for a server that hangs."""

    async def close(self, *, timeout: float | None = CLOSE_TIMEOUT) -> None:
        with suppress(asyncio.TimeoutError):
            await super().close(timeout=timeout)


def _postgres_engine(location: StoreUrl, pool: dict[str, int]) -> AsyncEngine:
    options = {"timeout": CONNECT_TIMEOUT, "connection_class": _Connection}
    with translate_database_errors(location):
        engine = create_async_engine(location.url, connect_args=options, **pool)
    event.listen(engine.sync_engine, "checkout", _discard_closed_connection)
    return engine


def _discard_closed_connection(_: object, record: ConnectionPoolEntry, __: object) -> None:
    """Discard a connection that the server has closed.

    The driver knows that without asking the server.

    `pool_pre_ping` would cost a round trip for each use.
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
    # isolation_level None: Python's driver begins transactions late and commits before DDL, so
    # transactions are begun here
    options = {"isolation_level": None, "timeout": busy_seconds}
    engine = create_async_engine(location.url, connect_args=options, **pool)
    alone = create_engine(
        location.url.set(drivername="sqlite"), pool_size=1, connect_args=options, execution_options={_WRITES: True}
    )
    for one in (engine.sync_engine, alone):
        event.listen(one, "connect", _opened)
        event.listen(one, "begin", _begin)
    return engine, alone


def _opened(connection: Any, _: object) -> None:
    try:
        _set_up(connection)
    except BaseException:
        # SQLAlchemy does not close a connection that failed here, and its thread would keep the
        # process from ending
        connection.close()
        raise


def _begin(connection: Connection) -> None:
    # A transaction that reads first and then writes would fail instead of waiting if another one
    # wrote in between.
    immediate = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _transacted(engine: Engine, work: Callable[[Connection], ResultT]) -> ResultT:
    with engine.begin() as connection:
        return work(connection)


def _set_up(connection: Any) -> None:
    cursor = connection.cursor()
    # readers and the writer do not wait for each other
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    # a gateway deletes its copy of an event once the ledger has it, so a commit has to be on the
    # disk
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()
