"""Answers as an event stream, written straight to the server's connection.

A client that reads gets its events by plain calls, from the message of the engine to the socket. The coroutine of its
stream takes over for all that is rarer: the start, the end, failures, a full socket, transports that cannot push.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmops.gateway.http.outlet import Outlet, outlet_of, server_send
from llmops.gateway.http.watch import ClientWatch


class EventSource(ABC):
    """What an EventStream sends."""

    @abstractmethod
    async def next(self) -> bytes | None:
        """The next events (may be empty), None at the end. Must not raise: failures are events too."""

    def attach(self, outlet: Outlet) -> None:
        """Events may go to `outlet` at once while `next` waits and `outlet` is not blocked."""
        return

    @abstractmethod
    def cancel(self) -> None:
        """The client is gone."""

    @abstractmethod
    def close(self) -> None:
        """Called once, always."""


class EventStream(Response):
    """A 200 whose body is an event stream. Make it only when the first event or an error is known."""

    media_type = "text/event-stream"

    def __init__(self, source: EventSource, watch: ClientWatch, headers: Mapping[str, str], *, patience: float) -> None:
        """`patience`: seconds after which a client that takes nothing more of its events is dropped."""
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._watch = watch
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        source = self._source
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            write = server_send(scope, send)
            outlet = outlet_of(scope)
            if outlet is not None:
                source.attach(outlet)
            while (data := await self._next(outlet)) is not None:
                if data:
                    await self._wait(write({"type": "http.response.body", "body": data, "more_body": True}), outlet)
            await self._wait(send({"type": "http.response.body", "body": b"", "more_body": False}), outlet)
        finally:
            source.close()
            self._watch.close()

    async def _next(self, outlet: Outlet | None) -> bytes | None:
        data = await self._source.next()
        if outlet is not None:
            outlet.flush()
        return data

    async def _wait(self, writing: Awaitable[None], outlet: Outlet | None) -> None:
        if outlet is None or not outlet.blocked:
            await writing
            return
        try:
            await asyncio.wait_for(writing, self._patience)
        except asyncio.TimeoutError:
            self._source.cancel()
            outlet.abort()
