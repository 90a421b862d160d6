"""Access to the store from HTTP endpoints.

Each process has one shared store. Errors of the store become HTTP errors.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated
from weakref import WeakValueDictionary

from fastapi import Depends
from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request

from llmops.errors import DuplicateNameError, InputError, LlmopsError, UnknownResourceError
from llmops.gateway.errors import ApiError, InvalidRequestError, NotFoundError, UnavailableError
from llmops.gateway.interfaces import Caller
from llmops.store.database import MAX_OVERFLOW
from llmops.store.factory import LazyStore


class ConflictError(ApiError):
    """A 409 response: the object that a request creates already exists."""

    status = 409
    type = "invalid_request_error"
    code = "already_exists"


#: Seconds of one use of the store by a request, after which the store counts as unavailable: longer
#: than a report of a million rows takes. A server that hangs would keep all connections.
STORE_TIMEOUT = 60.0


@contextmanager
def client_errors() -> Iterator[None]:
    """Turn errors of a client's input into HTTP errors with the same message.

    Other errors pass unchanged.
    """
    try:
        yield
    except UnknownResourceError as error:
        raise NotFoundError(error.message) from error
    except DuplicateNameError as error:
        raise ConflictError(error.message) from error
    except InputError as error:
        raise InvalidRequestError(error.message) from error


class SharedStore(LazyStore):
    """The store that all endpoints of a process share.

    The store is opened at its first use, so that a process can start without the store. While the
    store does not answer, connecting raises UnavailableError. The reason names hosts and files, so
    it is logged and not sent to clients.
    """

    def __init__(self, url: str) -> None:
        # SQLite's async driver starts a thread for each connection, for which a process may lack
        # memory
        super().__init__(url, max_overflow=0 if url.startswith("sqlite") else MAX_OVERFLOW)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def in_turn(self, caller: Caller) -> AsyncIterator[None]:
        """Wait until the tenant's other requests in this block have ended.

        A report can read a million rows, and no tenant may take all connections and threads.
        """
        async with self._turns.setdefault(caller.tenant_id or caller.share, asyncio.Lock()):
            yield

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection for queries. Raises UnavailableError if the store does not answer."""
        with _hide_store_errors():
            async with asyncio.timeout(STORE_TIMEOUT), super().read() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction. Raises UnavailableError if the store does not answer."""
        with _hide_store_errors():
            async with asyncio.timeout(STORE_TIMEOUT), super().write() as connection:
                yield connection


@contextmanager
def _hide_store_errors() -> Iterator[None]:
    try:
        yield
    except ApiError:
        raise
    except (LlmopsError, exc.TimeoutError, TimeoutError) as error:
        detail = "The store does not answer in time."
        if not isinstance(error, TimeoutError):
            detail = error.message if isinstance(error, LlmopsError) else "All connections to the store are in use."
        message = "The store does not answer now; try again later."
        raise UnavailableError(message, code="store_unavailable", detail=detail) from error


async def _shared_store(request: Request) -> SharedStore:
    store: SharedStore = request.app.state.store
    return store


# The store of the application that serves a request, as a parameter of endpoints.
StoreOfApp = Annotated[SharedStore, Depends(_shared_store)]
