"""An open store: connections to read and to write with."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any, TypeVar

import asyncpg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from llmops.errors import MissingDependencyError
from llmops.store.errors import translate_database_errors
from llmops.store.store_url import StoreUrl

# INSERT … RETURNING
MIN_SQLITE_VERSION = (3, 35)
BUSY_TIMEOUT = 10.0
CONNECT_TIMEOUT = 10.0
# a server that says nothing does not say goodbye either
CLOSE_TIMEOUT = 1.0
_WRITES = "llmops_writes"
ResultT = TypeVar("ResultT")


class Store:
    """One database. Queries take a connection, so that several can be one transaction."""

    def __init__(self, place: StoreUrl, engine: AsyncEngine, alone: Engine | None = None) -> None:
        """`alone`: what `transact` has on SQLite."""
        self.place, self._alone = place, alone
        # PostgreSQL shows each statement what is committed by then, within a transaction too, whose beginning and end
        # would be two round trips more; a statement is prepared and executed on one connection
        alike = place.file is None and not place.pooled
        self._reading = engine.execution_options(isolation_level="AUTOCOMMIT") if alike else engine
        self._writing = engine.execution_options(**{_WRITES: True})
        # SQLite has one writer, and lets others look again and again whether it is done: here they wait in a line
        self._turn: AbstractAsyncContextManager[None] = asyncio.Lock() if place.file else nullcontext()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection to ask with, and nothing else. Raises InputError or ResourceError when it cannot."""
        with translate_database_errors(self.place):
            async with self._reading.connect() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction: kept when the block ends, undone when it raises. Raises as `read` does. Not within another."""
        with translate_database_errors(self.place):
            async with self._turn, self._writing.begin() as connection:
                yield connection

    async def transact(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """`write` for what is many statements: the driver of SQLite would send each of them to a thread and back, and
        here all of `work` is done in one."""
        if self._alone is None:
            async with self.write() as connection:
                return await connection.run_sync(work)
        with translate_database_errors(self.place):
            async with self._turn:
                return await asyncio.to_thread(_transacted, self._alone, work)

    async def close(self) -> None:
        if self._alone is not None:
            await asyncio.to_thread(self._alone.dispose)
        await self._reading.dispose()

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def connect(place: StoreUrl, pool_size: int = 5, busy_seconds: float = BUSY_TIMEOUT) -> Store:
    """The database as it is. `busy_seconds`: how long a SQLite writer waits for another one. Nothing is opened yet."""
    if place.file is None:
        return Store(place, _postgres_engine(place, pool_size))
    return Store(place, *_sqlite_engines(place, pool_size, busy_seconds))


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """SQLAlchemy closes connections without a bound, so that a server that hangs would keep a process from ending."""

    async def close(self, *, timeout: float | None = CLOSE_TIMEOUT) -> None:
        with suppress(asyncio.TimeoutError):
            await super().close(timeout=timeout)


def _postgres_engine(place: StoreUrl, pool_size: int) -> AsyncEngine:
    options = {"timeout": CONNECT_TIMEOUT, "connection_class": _Connection}
    with translate_database_errors(place):
        engine = create_async_engine(place.url, pool_size=pool_size, connect_args=options)
    event.listen(engine.sync_engine, "checkout", _discard_closed_connection)
    return engine


def _discard_closed_connection(_: object, record: ConnectionPoolEntry, __: object) -> None:
    """One that the server has closed meanwhile is another's turn. The driver has heard of it: asking the server, as
    `pool_pre_ping` does, would be a round trip for each use."""
    driver = record.driver_connection
    if driver is not None and driver.is_closed():
        raise DisconnectionError


def _sqlite_engines(place: StoreUrl, pool_size: int, busy_seconds: float) -> tuple[AsyncEngine, Engine]:
    if sqlite3.sqlite_version_info < MIN_SQLITE_VERSION:
        raise MissingDependencyError(
            f"This Python has SQLite {sqlite3.sqlite_version}, and a store needs 3.35 or later; use another Python, or "
            "PostgreSQL."
        )
    # isolation_level None: Python's driver begins transactions late and commits before DDL; we begin them ourselves
    options = {"isolation_level": None, "timeout": busy_seconds}
    engine = create_async_engine(place.url, pool_size=pool_size, connect_args=options)
    alone = create_engine(
        place.url.set(drivername="sqlite"), pool_size=1, connect_args=options, execution_options={_WRITES: True}
    )
    for one in (engine.sync_engine, alone):
        event.listen(one, "connect", _opened)
        event.listen(one, "begin", _begin)
    return engine, alone


def _opened(connection: Any, _: object) -> None:
    try:
        _set_up(connection)
    except BaseException:
        # nobody else closes it, and its thread would keep the process from ending
        connection.close()
        raise


def _begin(connection: Connection) -> None:
    # a transaction that reads first and then writes would fail, and not wait, when another wrote in between
    immediate = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _transacted(engine: Engine, work: Callable[[Connection], ResultT]) -> ResultT:
    with engine.begin() as connection:
        return work(connection)


def _set_up(connection: Any) -> None:
    cursor = connection.cursor()
    # readers and the one writer do not wait for each other
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    # a journal is deleted once the ledger has it: what is committed has to be on the disk
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()
