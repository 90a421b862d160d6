"""uvicorn's HTTP protocol with bounds on what a client can send, and hold, before any request of its exists.

The parser keeps an unfinished header in memory and looks at all of it with each piece, so it must not get more than a
header may have. The rest is time: for a header, between requests, after an answer to a request that goes on.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmops.gateway.errors import (
    ApiError,
    HeaderTooLargeError,
    InvalidRequestError,
    RequestTimeoutError,
    UnavailableError,
)
from llmops.gateway.http.caller import client_of
from llmops.gateway.observability.metrics import Metrics
from llmops.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

# seconds: between two lines in the log about the same thing; for a refused client to read why; for a client to go on
# sending what was answered already
LOG_EVERY, REFUSED, LINGER = 10.0, 1.0, 10.0
# what a client has to take of an answer that waits for it
LEAST_BYTES_PER_SECOND = 1024
# connections being refused because the server is full
MOST_REFUSED = 64
# descriptors that are kept for Triton, workers, files; what is above that is not for clients
RESERVED = 64


@dataclass(slots=True)
class Bounds:
    """What all connections of one worker keep to, and how many there are. Times in seconds.

    `per_client`: connections that one address may have, 0 for any number; `clients`: those that each has.
    """

    header_bytes: int
    connections: int
    per_client: int
    header_seconds: float
    client_seconds: float
    metrics: Metrics | None = None
    open: int = 0
    clients: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    descriptors: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _logged: dict[str, tuple[float, int]] = field(default_factory=dict)

    def full(self, descriptor: int, address: str) -> str | None:
        """Why another connection cannot be accepted; its `descriptor` is always the lowest free one."""
        if descriptor >= self.descriptors - RESERVED:
            return f"the process has nearly all of its {self.descriptors} file descriptors in use"
        if self.open >= self.connections:
            return f"{self.connections} connections are open, as many as limits.connections allows"
        if self.per_client and self.clients[address] >= self.per_client:
            return f"{address} has {self.per_client}, as many as limits.connections_per_client allows"
        return None

    def enter(self, address: str) -> None:
        self.open += 1
        self.clients[address] += 1

    def leave(self, address: str) -> None:
        self.open -= 1
        self.clients[address] -= 1
        if not self.clients[address]:
            del self.clients[address]

    def note(self, reason: str, text: str) -> None:
        """Count it, and say it in the log, but not every time."""
        if self.metrics is not None:
            self.metrics.refused.labels(reason).inc()
        last, missed = self._logged.get(reason, (-LOG_EVERY, 0))
        if monotonic() - last < LOG_EVERY:
            self._logged[reason] = last, missed + 1
            return
        self._logged[reason] = monotonic(), 0
        log.warning("%s%s", text, f" ({missed} more since the last such line)" if missed else "")


def bounds_of(settings: GatewaySettings, metrics: Metrics | None = None) -> Bounds:
    limits, timeouts = settings.limits, settings.timeouts
    share = limits.connections_per_client
    per_client = max(limits.connections // 2, 1) if share is None else share
    return Bounds(limits.header_bytes, limits.connections, per_client, timeouts.header, timeouts.client, metrics)


def protocol_of(bounds: Bounds) -> type[BoundedProtocol]:
    """A protocol class for uvicorn's `http`, which makes one per connection."""
    return type("Bounded", (BoundedProtocol,), {"bounds": bounds})


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `_head`: bytes since the last request was complete, -1 inside of a request's body."""

    bounds: Bounds
    _head = 0
    _body = 0
    _overhead = 0
    _closing = False
    _address: str | None = None
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        bounds = self.bounds
        # the sockets on which workers ask each other are not for clients
        if self.client is not None:
            address = client_of(self.client[0])
            why = bounds.full(transport.get_extra_info("socket").fileno(), address)
            if why is not None:
                self._turn_away(why)
                return
            self._address = address
            bounds.enter(address)
        self._wait_for_header()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self.bounds.leave(self._address)
            self._address = None
        self._stop_waiting()
        self._stop_looking()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        while self._head >= 0 and len(data) > (room := self.bounds.header_bytes - self._head):
            if not self._feed_head(data[:room]):
                return
            data = data[room:]
        if self._head >= 0:
            self._head += len(data)
        self._feed(data)
        if self._head > 0 and self._timer is None:
            self._wait_for_header()

    def on_message_begin(self) -> None:
        self._head = self._head or 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = -1
        self._body = self._overhead = 0
        if self._timer is not None:
            self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = 0
        if self._timer is not None:
            self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._head < 0 and self.cycle.response_complete and not self.transport.is_closing():
            # closing at once would take the answer from a client that is still sending
            self._timer = self.loop.call_later(LINGER, self.transport.close)
        self._look_whether_it_reads()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_whether_it_reads()

    def _look_whether_it_reads(self) -> None:
        """An answer that is not taken stays in memory, and keeps even a connection open that was closed."""
        left = self.transport.get_write_buffer_size()
        if left and self._unread is None:
            self._unread = self.loop.call_later(self.bounds.client_seconds, self._look_again, left)

    def _look_again(self, before: int) -> None:
        self._unread = None
        seconds = self.bounds.client_seconds
        if self.transport.get_write_buffer_size() > before - seconds * LEAST_BYTES_PER_SECOND:
            self.bounds.note("client", f"{self.client} took nothing more of its answer for {seconds:g} s; dropped.")
            self.transport.abort()
        else:
            self._look_whether_it_reads()

    def _stop_looking(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _feed_head(self, data: bytes) -> bool:
        """As much as a header may have; whether what follows is to be parsed as well."""
        self._head += len(data)
        self._feed(data)
        if self._closing or self.transport.is_closing():
            return False
        limit = self.bounds.header_bytes
        if self._head < limit:  # it was complete, or many were
            return True
        self._refuse("header_bytes", HeaderTooLargeError(f"The request's header has more than {limit} bytes."))
        return False

    def send_400_response(self, msg: str) -> None:
        self._refuse("invalid", InvalidRequestError("This is not a valid HTTP request."))

    def _feed(self, data: bytes) -> None:
        """A chunked body's framing and trailer are headers too: they must not go on without any of the body."""
        before = self._body
        super().data_received(data)
        if self._head >= 0 or self._body != before:
            self._overhead = 0
            return
        self._overhead += len(data)
        if self._overhead > self.bounds.header_bytes and not self.transport.is_closing():
            self.bounds.note("header_bytes", "A request's chunks have more framing than a header may have; dropped.")
            self.transport.abort()

    def _wait_for_header(self) -> None:
        self._timer = self.loop.call_later(self.bounds.header_seconds, self._header_is_late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _header_is_late(self) -> None:
        self._timer = None
        if self._head > 0:
            seconds = self.bounds.header_seconds
            self._refuse("header", RequestTimeoutError(f"The request's header was not complete after {seconds:g} s."))
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, reason: str, error: ApiError) -> None:
        self.bounds.note(reason, f"A connection from {self.client} was closed: {error.message}")
        self._answer(error)
        self.loop.call_later(REFUSED, self.transport.abort)

    def _turn_away(self, why: str) -> None:
        bounds = self.bounds
        bounds.note("connections", f"A new connection was refused: {why}.")
        if bounds.refused >= MOST_REFUSED:
            self._closing = True
            self.transport.abort()
            return
        bounds.refused += 1
        error = UnavailableError("The gateway has no free connections; try again.", code="overloaded")
        self._answer(error)
        self.loop.call_later(REFUSED, self._turned_away)

    def _turned_away(self) -> None:
        self.bounds.refused -= 1
        self.transport.abort()

    def _leave_answering(self) -> bool:
        """Tell the handler of an earlier request on this connection that the client left; whether it had begun."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return bool(cycle.response_started)

    def _answer(self, error: ApiError) -> None:
        """Write it and end our side. What still comes is read and dropped, or a reset would overtake the answer."""
        self._closing = True
        if self._leave_answering():
            self.transport.abort()
            return
        body = error.body_json()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**error.headers(), **headers}.items())
        self.transport.write(f"HTTP/1.1 {error.status} {error.phrase}\r\n{lines}\r\n".encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
