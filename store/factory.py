"""Opening of stores, which includes the migration of their schema."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.clocks import wait_with_timeout
from llmops.errors import ResourceError
from llmops.store.database import MAX_OVERFLOW, ResultT, Store, connect
from llmops.store.migrate import migrate
from llmops.store.store_url import StoreUrl


async def open_store(url: str, pool_size: int = 5, max_overflow: int = MAX_OVERFLOW) -> Store:
    """Open the store at `url`. Create and migrate its schema if necessary.

    Raises:
        InputError: The URL, password or file is wrong.
        VersionMismatchError: A newer llmops created the schema.
        ResourceError: The server cannot be reached, or the server or disk does not work.
    """
    location = StoreUrl.parse(url)
    location.create()
    store = connect(location, pool_size, max_overflow=max_overflow)
    try:
        await migrate(store)
    except BaseException:
        await store.close()
        raise
    return store


async def within(seconds: float, work: Awaitable[ResultT]) -> ResultT:
    """Await `work` on a store for at most `seconds`.

    Raises:
        LlmopsError: The store cannot be reached, failed, or did not answer in time. The driver's
            text is left out of the message, because it may hold values.
    """
    try:
        return await wait_with_timeout(seconds, work)
    except TimeoutError as error:
        raise ResourceError(f"The store did not answer within {seconds:g} s; check the database server.") from error
    except SQLAlchemyError as error:
        raise ResourceError(
            f"The store failed ({type(error).__name__}); see the log of the database server."
        ) from error


class LazyStore:
    """A store that is opened at its first use, so that a process can start without the store."""

    def __init__(self, url: str, pool_size: int = 5, max_overflow: int = MAX_OVERFLOW) -> None:
        self.url, self._pool_size, self._max_overflow = url, pool_size, max_overflow
        self._store: Store | None = None
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection for queries. Raises the errors of `open_store` too."""
        async with (await self._opened()).read() as connection:
            yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction for writing. Raises the errors of `open_store` too."""
        async with (await self._opened()).write() as connection:
            yield connection

    async def ask(self, work: Callable[[AsyncConnection], Awaitable[ResultT]]) -> ResultT:
        """Return the result of `work` on a connection. Raises the errors of `open_store` too."""
        async with self.read() as connection:
            return await work(connection)

    async def transact(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """Run `work` in a transaction and return its result.

        Raises the errors of `open_store` too.
        """
        return await (await self._opened()).transact(work)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()

    async def _opened(self) -> Store:
        async with self._opening:
            if self._store is None:
                self._store = await open_store(self.url, self._pool_size, self._max_overflow)
        return self._store
