"""An open store: connections to read and to write with."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from llmops.errors import MissingDependencyError
from llmops.store.failures import explained
from llmops.store.place import Place

# INSERT … RETURNING
OLDEST_SQLITE = (3, 35)
BUSY_SECONDS = 10.0
CONNECT_SECONDS = 10.0
_WRITES = "llmops_writes"


class Store:
    """One database. Queries take a connection, so that several can be one transaction."""

    def __init__(self, place: Place, engine: AsyncEngine) -> None:
        self.place = place
        self._reading = engine
        self._writing = engine.execution_options(**{_WRITES: True})
        # SQLite has one writer, and lets others look again and again whether it is done: here they wait in a line
        self._turn: AbstractAsyncContextManager[None] = asyncio.Lock() if place.file else nullcontext()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection that sees one state of the store. Raises InputError or ResourceError when it cannot."""
        with explained(self.place):
            async with self._reading.connect() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction: kept when the block ends, undone when it raises. Raises as `read` does. Not within another."""
        with explained(self.place):
            async with self._turn, self._writing.begin() as connection:
                yield connection

    async def close(self) -> None:
        await self._reading.dispose()

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def connect(place: Place, pool_size: int = 5, busy_seconds: float = BUSY_SECONDS) -> Store:
    """The database as it is. `busy_seconds`: how long a SQLite writer waits for another one. Nothing is opened yet."""
    engine = _sqlite_engine(place, pool_size, busy_seconds) if place.file else _postgres_engine(place, pool_size)
    return Store(place, engine)


def _postgres_engine(place: Place, pool_size: int) -> AsyncEngine:
    with explained(place):
        # a connection that the server has closed meanwhile is noticed before it is used
        return create_async_engine(
            place.url, pool_size=pool_size, pool_pre_ping=True, connect_args={"timeout": CONNECT_SECONDS}
        )


def _sqlite_engine(place: Place, pool_size: int, busy_seconds: float) -> AsyncEngine:
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise MissingDependencyError(
            f"This Python has SQLite {sqlite3.sqlite_version}, and a store needs 3.35 or later; use another Python, or "
            "PostgreSQL."
        )
    # isolation_level None: Python's driver begins transactions late and commits before DDL; we begin them ourselves
    engine = create_async_engine(
        place.url, pool_size=pool_size, connect_args={"isolation_level": None, "timeout": busy_seconds}
    )

    @event.listens_for(engine.sync_engine, "connect")
    def opened(connection: Any, _: object) -> None:
        try:
            _set_up(connection)
        except BaseException:
            # nobody else closes it, and its thread would keep the process from ending
            connection.close()
            raise

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        # a transaction that reads first and then writes would fail, and not wait, when another wrote in between
        immediate = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def _set_up(connection: Any) -> None:
    cursor = connection.cursor()
    # readers and the one writer do not wait for each other
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    # a journal is deleted once the ledger has it: what is committed has to be on the disk
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()
