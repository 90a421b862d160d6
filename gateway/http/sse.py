"""Answers as an event stream, written straight to the server's connection.

A client that reads gets its events by plain calls, from the message of the engine to the socket. The coroutine of its
stream takes over for all that is rarer: the start, the end, failures, a full socket, transports that cannot push.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmops.gateway.errors import ApiError
from llmops.gateway.http.chunked_writer import ChunkedWriter, chunked_writer_of, server_send
from llmops.gateway.http.client_disconnect import DisconnectWatcher
from llmops.gateway.http.error_handlers import error_response
from llmops.gateway.http.request_context import RequestContext, context_from_scope

# what readers of event streams skip
KEEPALIVE_COMMENT = b": keep-alive\n\n"


class EventSource(ABC):
    """What an EventStreamResponse sends."""

    async def start(self, context: RequestContext) -> None:
        """Wait for what decides between a 200 and an error. Raises ApiError, to be answered as one."""
        return

    def late(self, error: Exception) -> None:
        """`start` raised this when the 200 was already out: `next` is to tell it."""
        raise error

    @abstractmethod
    async def next(self) -> bytes | None:
        """The next events (may be empty), None at the end. Must not raise: failures are events too."""

    def attach(self, writer: ChunkedWriter) -> None:
        """Events may go to `writer` at once while `next` waits and `writer` is not blocked."""
        return

    @abstractmethod
    def cancel(self) -> None:
        """The client is gone."""

    @abstractmethod
    def close(self) -> None:
        """Called once, always."""


class EventStreamResponse(Response):
    """A 200 whose body is an event stream, or the error that came instead of its first event.

    Proxies cut what is silent: after `keepalive` seconds without an event the 200 goes out, and each time a comment, or
    the API's own sign of life. An error is an event then.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: EventSource,
        watch: DisconnectWatcher,
        *,
        patience: float,
        keepalive: float,
        sign: bytes = KEEPALIVE_COMMENT,
    ) -> None:
        """`patience`: seconds after which a client that takes nothing more of its events is dropped.
        `keepalive`: 0 for never; `sign` is what it then sends."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._watch = watch
        self._patience = patience
        self._keepalive = keepalive
        self._sign = sign

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        source = self._source
        pulse = KeepAlive(lambda: self._open(scope, send), self._keepalive, self._sign)
        try:
            try:
                await source.start(context_from_scope(scope))
            except Exception as error:
                if await pulse.begun():
                    source.late(error)
                elif isinstance(error, ApiError):
                    pulse.stop()
                    await error_response(error, scope)(scope, receive, send)
                    return
                else:
                    raise
            writer = await pulse.begin()
            if writer is not None:
                source.attach(writer)
            write = server_send(scope, send)
            while (data := await self._next(writer)) is not None:
                if data:
                    if writer is not None:
                        writer.wrote = True
                    await self._wait(write({"type": "http.response.body", "body": data, "more_body": True}), writer)
            await self._wait(send({"type": "http.response.body", "body": b"", "more_body": False}), writer)
        finally:
            pulse.stop()
            source.close()
            self._watch.close()

    async def _open(self, scope: Scope, send: Send) -> ChunkedWriter | None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        return chunked_writer_of(scope)

    async def _next(self, writer: ChunkedWriter | None) -> bytes | None:
        data = await self._source.next()
        if writer is not None:
            writer.flush()
        return data

    async def _wait(self, writing: Awaitable[None], writer: ChunkedWriter | None) -> None:
        if writer is None or not writer.blocked:
            await writing
            return
        try:
            await asyncio.wait_for(writing, self._patience)
        except TimeoutError:
            self._source.cancel()
            writer.abort()


class KeepAlive:
    """Opens a stream, at once or when it has been silent for a period, and keeps it from being silent for longer.

    Only the opening reaches a client for which there is no ChunkedWriter.
    """

    __slots__ = ("_begun", "_open", "_opening", "_period", "_sign", "_timer", "_writer")

    def __init__(self, open_stream: Callable[[], Awaitable[ChunkedWriter | None]], period: float, sign: bytes) -> None:
        """`period`: seconds, 0 for never; `sign`: what breaks the silence."""
        self._open = open_stream
        self._period = period
        self._sign = sign
        self._begun = False
        self._writer: ChunkedWriter | None = None
        self._opening: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(period, self._beat) if period else None

    async def begun(self) -> bool:
        """Whether the silence was broken before there was anything to say."""
        if self._opening is not None:
            await self._opening
        return self._begun

    async def begin(self) -> ChunkedWriter | None:
        """Where the stream's events go; None for a server that has no such short way."""
        if not await self.begun():
            self._begun = True
            self._writer = await self._open()
        return self._writer

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._opening is not None:
            self._opening.cancel()

    def _beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period, self._beat)
        if not self._begun:
            self._begun = True
            self._opening = asyncio.create_task(self._break_silence())
        elif self._writer is not None:
            self._give_sign(self._writer)

    async def _break_silence(self) -> None:
        self._writer = await self._open()
        if self._writer is not None:
            self._give_sign(self._writer)

    def _give_sign(self, writer: ChunkedWriter) -> None:
        if not writer.wrote and not writer.blocked:
            writer.write(self._sign)
        writer.wrote = False
