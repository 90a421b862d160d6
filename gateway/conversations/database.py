"""Access to the store within a time limit, with failures turned into errors of the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import LlmopsError
from llmops.gateway.errors import ApiError, InvalidRequestError, UnavailableError
from llmops.gateway.ratelimit.slots import FairSlots
from llmops.store.errors import is_text_error
from llmops.store.factory import LazyStore, within

T = TypeVar("T")

# Seconds that a request waits for the store before the store counts as unavailable.
STORE_TIMEOUT = 5.0
#: Maximum number of searches and reads of whole conversations that a gateway process runs at once,
#: so that other work finds a free connection and a core.
MAX_LONG_READS = 2


class Database:
    """A store that is opened at its first use."""

    def __init__(self, url: str, subject: str, advice: str) -> None:
        """Create the database for the store at `url`, which is opened at its first use.

        Args:
            url: The URL of the store.
            subject: The name of the data that cannot be used, for errors.
            advice: What a client can do instead, for errors.
        """
        self._store = LazyStore(url, pool_size=2)
        self._subject, self._advice = subject, advice
        self._long_reads = FairSlots(MAX_LONG_READS)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, work: Callable[[AsyncConnection], Awaitable[T]], owner: str | None = None) -> T:
        """Run `work` on a connection.

        Calls of the same `owner` run one after another, so that no owner takes all connections.

        Raises:
            UnavailableError: The store is unavailable, or was busy for too long.
        """
        return await self._answered(self._in_turn(owner, self._store.read, work))

    async def read_long(self, work: Callable[[AsyncConnection], Awaitable[T]], owner: str, share: str) -> T:
        """Run `work` like `read`, for work that takes up to a second or reads thousands of rows.

        At most `MAX_LONG_READS` such calls run at once, so that other work finds a connection and a
        core. Callers take turns by `share`: tenants first, then the callers of a tenant.
        """

        @asynccontextmanager
        async def connect() -> AsyncIterator[AsyncConnection]:
            async with self._long_reads.slot(share), self._store.read() as connection:
                yield connection

        return await self._answered(self._in_turn(owner, connect, work))

    async def write(self, work: Callable[[AsyncConnection], Awaitable[T]], owner: str | None = None) -> T:
        """Run `work` in a transaction; otherwise like `read`."""
        return await self._answered(self._in_turn(owner, self._store.write, work))

    async def close(self) -> None:
        await self._store.close()

    async def _in_turn(
        self,
        owner: str | None,
        connect: Callable[[], AbstractAsyncContextManager[AsyncConnection]],
        work: Callable[[AsyncConnection], Awaitable[T]],
    ) -> T:
        turn = asyncio.Lock() if owner is None else self._turns.setdefault(owner, asyncio.Lock())
        async with turn, connect() as connection:
            return await work(connection)

    async def _answered(self, work: Awaitable[T]) -> T:
        """Await `work`, and turn every failure of the store into an UnavailableError.

        A text that the store refuses is an InvalidRequestError, because trying again is of no use.

        A store that does not answer within `STORE_TIMEOUT` seconds has failed, too.
        """
        try:
            return await within(STORE_TIMEOUT, work)
        except ApiError:
            raise
        except LlmopsError as error:
            if is_text_error(error.__cause__):
                raise InvalidRequestError(
                    "The store cannot keep a text of this request, such as a title or an id: the encoding of its "
                    "database lacks a character, or makes the text too long. Shorten the text."
                ) from error
            raise UnavailableError(
                f"{self._subject} cannot be read or written now; try again, or {self._advice}.",
                code=f"{self._subject.split()[-1].lower()}_unavailable",
                detail=error.message,
            ) from error
