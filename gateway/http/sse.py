"""Server-sent events: their encoding, and the response that streams them to a client.

While a client keeps reading, its events take plain calls only, from the engine's message to the
socket (decision 0003). The coroutine of the response handles everything that is rarer: the start,
the end, failures, a full socket, and servers without a `ChunkedWriter`.
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

#: Readers of event streams skip comments.
KEEPALIVE_COMMENT = b": keep-alive\n\n"
#: Seconds before a DisconnectWatcher starts to listen. Creating a task is a good part of the cost
#: of a short response, so a client that leaves is noticed that much later.
LISTEN_DELAY = 0.1


def encode_event(data: bytes, name: str = "") -> bytes:
    """Return one server-sent event. `data` must not contain line breaks."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data) if name else b"data: %b\n\n" % data


def openai_error_event(error: ApiError) -> bytes:
    """Return the event on which OpenAI's clients raise APIError in the middle of a stream.

    Logs the error's detail.
    """
    log_detail(error)
    return encode_event(error.body_json())


class EventSource(ABC):
    """The events of one response."""

    async def start(self, context: RequestContext) -> None:
        """Wait until it is clear that the response can start. Raises ApiError if it cannot."""
        return

    def start_failed(self, error: Exception) -> None:
        """Handle an error that `start` raised after the response had started.

        The next call of `next` reports it.
        """
        raise error

    @abstractmethod
    async def next(self) -> bytes | None:
        """Return the next events (may be empty), or None at the end.

        Must not raise: failures are events too.
        """

    def attach(self, writer: ChunkedWriter) -> None:
        """Allow the source to write to `writer` directly.

        It may do so while `next` waits and `writer` is not blocked.
        """
        return

    @abstractmethod
    def cancel(self) -> None:
        """Stop, because the client has disconnected."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Called once, whatever happened."""


class DisconnectWatcher:
    """A listener on `receive` that notices when the client disconnects.

    It listens once the body is read, and notifies its current owner.
    """

    def __init__(self, receive: Receive) -> None:
        self.disconnected = False
        self._receive = receive
        self._callback: Callable[[], None] | None = None
        self._task: asyncio.Task | None = None
        self._timer = asyncio.get_running_loop().call_later(LISTEN_DELAY, self._start)

    def notify(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client disconnects, immediately if it already has.

        Replaces the last callback.
        """
        self._callback = callback
        if self.disconnected:
            callback()

    def close(self) -> None:
        """Stop listening."""
        self._callback = None
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            # a cancelled task holds its frames, and they hold this object: a reference cycle
            self._task = None

    def _start(self) -> None:
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        if self._callback is not None:
            self._callback()


class EventStreamResponse(Response):
    """A 200 whose body is an event stream, or the error that occurred before its first event.

    Proxies close idle connections. After `timeouts.keepalive` seconds without an event the response
    starts with status 200, and `keepalive_event` is sent at that interval; an error after that is
    sent as an event. Clients without a ChunkedWriter get the start of the response only.
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
            open_source: Returns the events. May wait long, as requests queue for a replica.
            watcher: Closed when the response has ended.
            timeouts: `keepalive` (0 for never), and `client`, after which a client that reads
                nothing is dropped.
            keepalive_event: Sent when nothing else was sent for `timeouts.keepalive`.
            error_event: Encodes an error of `open_source` that comes after the response has
                started.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._open_source, self._watcher, self._timeouts = open_source, watcher, timeouts
        self._keepalive_event, self._error_event = keepalive_event, error_event
        self._writer: ChunkedWriter | None = None
        self._started = False
        self._early_start: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
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
        # the server's own `send`, if the application runs behind the middleware
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
        """Return True if the keep-alive has started the response."""
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
    """A single event: the error because of which there is no other source."""

    def __init__(self, error_event: Callable[[ApiError], bytes]) -> None:
        self._error_event = error_event
        self._data: bytes | None = None

    def start_failed(self, error: Exception) -> None:
        if not isinstance(error, ApiError):
            log.error("The stream failed before its first event", exc_info=error)
            error = InternalError("The gateway failed before the stream began.")
        log_detail(error)
        self._data = self._error_event(error)

    async def next(self) -> bytes | None:
        data, self._data = self._data, None
        return data

    def cancel(self) -> None:
        return

    def close(self) -> None:
        return
