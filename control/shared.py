"""The store that all endpoints of one process share, opened when it is needed first: a process starts without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import LlmopsError
from llmops.gateway.errors import ApiError, UnavailableError
from llmops.store.database import Store
from llmops.store.open import open_store


class SharedStore:
    """Connections as Store has them. Raises UnavailableError for a store that cannot be asked: what is wrong with it
    names its place, and is for the log."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store: Store | None = None
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        try:
            async with (await self._opened()).read() as connection:
                yield connection
        except (LlmopsError, exc.TimeoutError) as error:
            raise _away(error) from error

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        try:
            async with (await self._opened()).write() as connection:
                yield connection
        except (LlmopsError, exc.TimeoutError) as error:
            raise _away(error) from error

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()

    async def _opened(self) -> Store:
        async with self._opening:
            if self._store is None:
                self._store = await open_store(self.url)
        return self._store


def _away(error: LlmopsError | exc.TimeoutError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    detail = error.message if isinstance(error, LlmopsError) else "All of its connections are in use."
    return UnavailableError("The store cannot be asked now; try again.", code="store_unavailable", detail=detail)
