"""The store that all endpoints of one process share, opened when it is needed first: a process starts without it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import LlmopsError
from llmops.gateway.errors import ApiError, UnavailableError
from llmops.store.factory import LazyStore


class SharedStore:
    """Connections as Store has them. Raises UnavailableError for a store that cannot be asked: what is wrong with it
    names its place, and is for the log."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store = LazyStore(url)

    def read(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return _translate_errors(self._store.read())

    def write(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return _translate_errors(self._store.write())

    async def close(self) -> None:
        await self._store.close()


@asynccontextmanager
async def _translate_errors(connecting: AbstractAsyncContextManager[AsyncConnection]) -> AsyncIterator[AsyncConnection]:
    try:
        async with connecting as connection:
            yield connection
    except (LlmopsError, exc.TimeoutError) as error:
        raise _unavailable(error) from error


def _unavailable(error: LlmopsError | exc.TimeoutError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    detail = error.message if isinstance(error, LlmopsError) else "All of its connections are in use."
    return UnavailableError("The store cannot be asked now; try again.", code="store_unavailable", detail=detail)
