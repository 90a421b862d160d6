"""Server-sent events: their encoding, and the response that streams them to a client.

While a client keeps reading, events pass from the engine's message to the socket in plain function
calls (docs/decisions/0003). The coroutine of the response handles the rare cases: the start, the
end, failures, a full socket, and servers without a `ChunkedWriter`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmops.gateway.errors import ApiError, InternalError, log_detail
from llmops.gateway.http.chunked_writer import SERVER_SEND_KEY, ChunkedWriter, chunked_writer_of
from llmops.gateway.http.error_handlers import error_response
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.settings import Timeouts

log = logging.getLogger(__name__)

#: Comment that keeps an idle connection open. Readers of event streams skip comments.
KEEPALIVE_COMMENT = b": keep-alive\n\n"
#: Seconds before a DisconnectWatcher starts to listen. A short response is over by then and saves
#: the task, which is a large part of its cost.
LISTEN_DELAY = 0.1


def encode_event(data: bytes, name: str = "") -> bytes:
    """Return a server-sent event, encoded. `data` must not contain line breaks."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data) if name else b"data: %b\n\n" % data


def openai_error_event(error: ApiError) -> bytes:
    """Return the event that makes OpenAI's clients raise APIError in the middle of a stream.

    The error's detail is logged.
    """
    log_detail(error)
    return encode_event(error.body_json())


class EventSource(ABC):
    """An interface to the source of a response's events."""

    async def start(self, context: RequestContext) -> None:
        """Wait until the response can start.

        Raises:
            ApiError: The response cannot start.
        """
        return

    def start_failed(self, error: Exception) -> None:
        """Handle an error that `start` raised after the response had started.

        The next call of `next` returns the error's event.
        """
        raise error

    @abstractmethod
    async def next(self) -> bytes | None:
        """Return the next events, encoded (may be empty), or None at the end.

        Must not raise: failures are returned as events.
        """

    def attach(self, writer: ChunkedWriter) -> None:
        """Allow the source to write to `writer` directly.

        The source may write while `next` waits and `writer` is not blocked.
        """
        return

    @abstractmethod
    def cancel(self) -> None:
        """Stop producing events, because the client has disconnected."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Called exactly once, also after a failure."""


class DisconnectWatcher:
    """A listener on ASGI's `receive` that notices when the client disconnects.

    The watcher listens once the body is read, and calls the callback that was registered last.

    Attributes:
        disconnected: True once the client has disconnected.
    """

    def __init__(self, receive: Receive) -> None:
        self.disconnected = False
        self._receive = receive
        self._callback: Callable[[], None] | None = None
        self._task: asyncio.Task | None = None
        self._timer = asyncio.get_running_loop().call_later(LISTEN_DELAY, self._start)

    def notify(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client disconnects, or immediately if it already has.

        `callback` replaces the previous callback.
        """
        self._callback = callback
        if self.disconnected:
            callback()

    def close(self) -> None:
        """Stop listening for a disconnect."""
        self._callback = None
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            # A cancelled task holds its frames, which hold this object; dropping the task breaks
            # the cycle.
            self._task = None

    def _start(self) -> None:
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        if self._callback is not None:
            self._callback()


#: Headers of a stream, which keep caches and nginx from holding events back.
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStreamResponse(Response):
    """A response that streams events, or the error that occurred before the first event.

    Proxies close idle connections. After `timeouts.keepalive` seconds without an event the response
    starts with status 200, and `keepalive_event` is sent at that interval. A later error is sent as
    an event. If the server has no ChunkedWriter, only the start of the response is sent early.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        open_source: Callable[[], Awaitable[EventSource]],
        watcher: DisconnectWatcher,
        timeouts: Timeouts,
        *,
        keepalive_event: bytes = KEEPALIVE_COMMENT,
        error_event: Callable[[ApiError], bytes] = openai_error_event,
    ) -> None:
        """Create the response.

        Args:
            open_source: Returns the source of events. May wait long, because requests queue for a
                replica.
            watcher: The listener for a disconnect, which is closed when the response has ended.
            timeouts: The setting `keepalive` (0 for never), and `client`, the seconds after which a
                client that reads nothing is dropped.
            keepalive_event: The event that is sent after `timeouts.keepalive` seconds without
                another event.
            error_event: Encodes an error of `open_source` that occurs after the response has
                started.
        """
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._open_source, self._watcher, self._timeouts = open_source, watcher, timeouts
        self._keepalive_event, self._error_event = keepalive_event, error_event
        self._writer: ChunkedWriter | None = None
        self._started = False
        self._early_start: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response to the client."""
        source: EventSource | None = None
        context = context_of(scope)
        self._scope, self._send = scope, send
        if self._timeouts.keepalive:
            self._timer = asyncio.get_running_loop().call_later(self._timeouts.keepalive, self._keep_alive)
        try:
            try:
                source = await self._open_source()
                await source.start(context)
            except Exception as error:
                if source is None:
                    context.finish_reason = error.finish_reason if isinstance(error, ApiError) else "error"
                if not await self._is_started_early():
                    self._stop_keepalive()
                    if not isinstance(error, ApiError):
                        raise
                    await error_response(error, scope)(scope, receive, send)
                    return
                if source is None:
                    source = _ErrorSource(self._error_event)
                source.start_failed(error)
            if not await self._is_started_early():
                self._started = True
                await self._start()
            await self._stream(source)
        finally:
            self._stop_keepalive()
            if source is not None:
                source.close()
            self._watcher.close()

    async def _stream(self, source: EventSource) -> None:
        writer = self._writer
        # If the application runs behind the middleware, events go to the server's own `send`.
        write: Send = self._scope.get(SERVER_SEND_KEY, self._send)
        if writer is not None:
            source.attach(writer)
        while True:
            data = await source.next()
            if writer is not None:
                writer.flush()
            if data is None:
                break
            if data:
                if writer is not None:
                    writer.wrote = True
                await self._wait(source, write({"type": "http.response.body", "body": data, "more_body": True}))
        await self._wait(source, self._send({"type": "http.response.body", "body": b"", "more_body": False}))

    async def _wait(self, source: EventSource, writing: Awaitable[None]) -> None:
        if self._writer is None or not self._writer.blocked:
            await writing
            return
        try:
            await asyncio.wait_for(writing, self._timeouts.client)
        except TimeoutError:
            source.cancel()
            self._writer.abort()

    async def _start(self) -> None:
        await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._writer = chunked_writer_of(self._scope)

    async def _is_started_early(self) -> bool:
        """Return True if a keep-alive has started the response, after waiting for that start."""
        if self._early_start is not None:
            await self._early_start
        return self._started

    def _stop_keepalive(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._early_start is not None:
            self._early_start.cancel()

    def _keep_alive(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeouts.keepalive, self._keep_alive)
        if not self._started:
            self._started = True
            self._early_start = asyncio.create_task(self._start_early())
        elif self._writer is not None:
            if not self._writer.wrote and not self._writer.blocked:
                self._writer.write(self._keepalive_event)
            self._writer.wrote = False

    async def _start_early(self) -> None:
        await self._start()
        if self._writer is not None and not self._writer.blocked:
            self._writer.write(self._keepalive_event)
            self._writer.wrote = False


class _ErrorSource(EventSource):
    """A source of a single event: the error that prevented the source of the response."""

    def __init__(self, error_event: Callable[[ApiError], bytes]) -> None:
        self._error_event = error_event
        self._data: bytes | None = None

    def start_failed(self, error: Exception) -> None:
        if not isinstance(error, ApiError):
            log.error(
                "A stream failed before its first event because of an internal error; its client receives an error",
                exc_info=error,
            )
            error = InternalError(
                "The gateway failed before the stream began; if a retry fails too, tell its operator."
            )
        log_detail(error)
        self._data = self._error_event(error)

    async def next(self) -> bytes | None:
        data, self._data = self._data, None
        return data

    def cancel(self) -> None:
        return

    def close(self) -> None:
        return
