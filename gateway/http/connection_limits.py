"""uvicorn's HTTP protocol with bounds on what a client can send, and hold, before any request of its exists.

The parser keeps an unfinished header in memory and looks at all of it with each piece, so it must not get more than a
header may have. It makes an object for each request, so it gets one request at a time: bytes behind a request that is
being answered stay unparsed, and the connection is read again when the answer is complete. The rest is time: for a
header, between requests, after an answer to a request that goes on.

When all connections are in use, those without a whole request make room for new ones.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmops.gateway.errors import (
    ApiError,
    HeaderTooLargeError,
    InvalidRequestError,
    RequestTimeoutError,
    UnavailableError,
)
from llmops.gateway.http.anonymous_caller import client_network
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# seconds: between two lines in the log about the same thing; for a refused client to read why; for a client to go on
# sending what was answered already
LOG_EVERY, REFUSED, LINGER = 10.0, 1.0, 10.0
# what a client has to take of an answer that waits for it
MIN_READ_BYTES_PER_SECOND = 1024
# connections being refused because the server is full
MAX_CONNECTIONS_BEING_REFUSED = 64
# descriptors that are kept for Triton, workers, files; what is above that is not for clients
RESERVED_DESCRIPTORS = 64

END_OF_HEADER = b"\r\n\r\n"
#: Bytes of a chunked body, at least, that the parser gets at once: a blank line within it may be its end.
MIN_CHUNKED_FEED = 1024
#: Bytes behind a request that is being answered, per connection, before it is no longer read. A
#: connection that is read shows that its client left, and some clients send a blank line.
MAX_PIPELINED_BYTES = 4096
#: Bytes that wait behind requests of all connections. One reading of a socket brings up to 256 KiB.
MAX_PIPELINED_BYTES_TOTAL = 16 * 2**20
#: Bytes of answers that their clients do not read, of all connections. Only what is above 64 KiB
#: per connection counts.
MAX_UNREAD_BYTES_TOTAL = 64 * 2**20
#: Share of all connections that is closed at once to make room, so that the search is rare.
EVICTION_DIVISOR = 64
#: Seconds without another search for connections to close after a search without a result.
EVICTION_RETRY_DELAY = 0.1


@dataclass(slots=True)
class ConnectionLimits:
    """What all connections of one worker keep to, and how many there are. Times in seconds.

    `per_client`: connections that one address may have, 0 for any number; `clients`: those that each has, the oldest
    first. `ahead`: bytes that wait behind requests of all connections; `unread`: connections whose clients do not read
    their answers, with the bytes that each had when its buffer was full.
    """

    header_bytes: int
    connections: int
    per_client: int
    header_seconds: float
    client_seconds: float
    metrics: GatewayMetrics | None = None
    open: int = 0
    clients: dict[str, dict[LimitedHttpProtocol, None]] = field(default_factory=dict)
    refused: int = 0
    ahead: int = 0
    unread: dict[LimitedHttpProtocol, int] = field(default_factory=dict)
    descriptors: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _logged: dict[str, tuple[float, int]] = field(default_factory=dict)
    _no_room_until: float = 0.0

    def full(self, descriptor: int, address: str) -> str | None:
        """Why another connection cannot be accepted; its `descriptor` is always the lowest free one."""
        if self.per_client and len(self.clients.get(address, ())) >= self.per_client:
            return f"{address} has {self.per_client}, as many as limits.connections_per_client allows"
        if descriptor >= self.descriptors - RESERVED_DESCRIPTORS and not self._make_room():
            return f"the process has nearly all of its {self.descriptors} file descriptors in use"
        if self.open >= self.connections and not self._make_room():
            return f"{self.connections} connections are open, as many as limits.connections allows"
        return None

    def enter(self, address: str, connection: LimitedHttpProtocol) -> None:
        self.open += 1
        self.clients.setdefault(address, {})[connection] = None

    def leave(self, address: str, connection: LimitedHttpProtocol) -> None:
        self.open -= 1
        own = self.clients[address]
        del own[connection]
        if not own:
            del self.clients[address]

    def _make_room(self) -> bool:
        """Close some of the connections without a whole request. Return False if there are none.

        Connections that never had a request go first, then idle ones, then those whose request's body is not complete;
        of each kind those of the address with the most connections, the oldest first.
        """
        if monotonic() < self._no_room_until:
            return False
        found = heapq.nsmallest(max(self.connections // EVICTION_DIVISOR, 1), self._closable())
        for *_, connection in found:
            connection.make_room()
        if not found:
            self._no_room_until = monotonic() + EVICTION_RETRY_DELAY
        return bool(found)

    def _closable(self) -> Iterator[tuple[int, int, int, LimitedHttpProtocol]]:
        # the number is unique, so that connections themselves are never compared
        number = 0
        for own in self.clients.values():
            for connection in own:
                number += 1
                progress = connection.progress
                if progress is not None:
                    yield progress, -len(own), number, connection

    def hold_pipelined(self, size: int) -> bool:
        """Count bytes that wait behind a request. Return False if all connections together hold too many."""
        self.ahead += size
        return self.ahead <= MAX_PIPELINED_BYTES_TOTAL

    def hold_unread(self, connection: LimitedHttpProtocol, size: int) -> None:
        """Note that a client does not read its answer. Beyond the bound, drop the largest answer of the address that
        holds the most."""
        self.unread[connection] = size
        if sum(self.unread.values()) <= MAX_UNREAD_BYTES_TOTAL:
            return
        totals: dict[str | None, int] = {}
        for one, held in self.unread.items():
            totals[one.address] = totals.get(one.address, 0) + held
        worst = max(self.unread, key=lambda one: (totals[one.address], self.unread[one]))
        self.note("unread", f"{worst.address} left {totals[worst.address]} bytes of answers unread; one was dropped.")
        del self.unread[worst]
        worst.transport.abort()

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


def connection_limits(settings: GatewaySettings, metrics: GatewayMetrics | None = None) -> ConnectionLimits:
    limits, timeouts = settings.limits, settings.timeouts
    share = limits.connections_per_client
    per_client = max(limits.connections // 2, 1) if share is None else share
    return ConnectionLimits(
        limits.header_bytes, limits.connections, per_client, timeouts.header, timeouts.client, metrics
    )


def protocol_class(bounds: ConnectionLimits) -> type[LimitedHttpProtocol]:
    """A protocol class for uvicorn's `http`, which makes one per connection."""
    return type("Bounded", (LimitedHttpProtocol,), {"bounds": bounds})


class _HoldingFlowControl(FlowControl):
    """uvicorn's flow control, which does not resume reading while `held`."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. `address` is its client, None for a worker's own socket.

    `_head`: bytes since the last request was complete, -1 inside of a request's body. `_ahead`: bytes behind a request
    that is being answered.
    """

    bounds: ConnectionLimits
    flow: _HoldingFlowControl
    address: str | None = None
    _head = 0
    _ahead = b""
    _length: int | None = None
    _body = 0
    _overhead = 0
    _closing = False
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _HoldingFlowControl(transport)
        bounds = self.bounds
        # the sockets on which workers ask each other are not for clients
        if self.client is not None:
            address = client_network(self.client[0])
            why = bounds.full(transport.get_extra_info("socket").fileno(), address)
            if why is not None:
                self._turn_away(why)
                return
            self.address = address
            bounds.enter(address, self)
        self._wait_for_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._stop_waiting()
        self._stop_looking()
        super().connection_lost(exc)

    def _leave(self) -> None:
        if self.address is not None:
            self.bounds.leave(self.address, self)
            self.address = None
        self.bounds.unread.pop(self, None)
        self._take_ahead()

    @property
    def progress(self) -> int | None:
        """Return how far the current request has come, from 0 (there never was one) to 2 (its body is not complete).

        None: the request is complete and its answer is not.
        """
        if self.cycle is None:
            return 0
        if self.cycle.response_complete:
            return 1
        return 2 if self._head < 0 else None

    def make_room(self) -> None:
        """Close the connection, which counts no longer."""
        self.bounds.note("room", f"An idle connection from {self.address} was closed to make room for a new one.")
        self._leave()
        self._closing = True
        self._leave_answering()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._ahead:
            self._keep_ahead(self._take_ahead() + data)
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        """Feed the parser request by request, until one is complete and its answer is not."""
        at, size = 0, len(data)
        while at < size:
            if self.progress is None:
                self._keep_ahead(data[at:] if at else data)
                return
            end = self._end_of_piece(data, at)
            piece = data if end - at == size else data[at:end]
            if self._head < 0:
                self._feed(piece)
            elif not self._feed_head(piece, end < size):
                return
            at = end
            if self._closing or self.transport.is_closing():
                return
        if self._head > 0 and self._timer is None:
            self._wait_for_header()

    def _end_of_piece(self, data: bytes, at: int) -> int:
        """Return the offset in `data` up to which the parser finds at most one request, or little more."""
        size = len(data)
        if self._head >= 0:
            end = data.find(END_OF_HEADER, at) + len(END_OF_HEADER)
            return min(end if end > at else size, at + max(self.bounds.header_bytes - self._head, 1))
        if self._length is None:
            given = next((value for name, value in self.headers if name == b"content-length"), b"")
            self._length = int(given) if given.isdigit() else 0
        if self._length:
            return min(size, at + max(self._length - self._body, 1))
        end = data.find(END_OF_HEADER, at + MIN_CHUNKED_FEED)
        return size if end < 0 else end + len(END_OF_HEADER)

    def _keep_ahead(self, data: bytes) -> None:
        self._ahead = data
        if not self.bounds.hold_pipelined(len(data)):
            self.bounds.note("pipeline", "Too many requests wait behind others of their connections; one was dropped.")
            self._closing = True
            self._leave_answering()
            self.transport.abort()
        elif len(data) > MAX_PIPELINED_BYTES:
            self.flow.pause_reading()
            self.flow.held = True

    def _take_ahead(self) -> bytes:
        data, self._ahead = self._ahead, b""
        self.bounds.ahead -= len(data)
        return data

    def on_message_begin(self) -> None:
        self._head = self._head or 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = -1
        self._body = self._overhead = 0
        self._length = None
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
        if self._ahead and not self.transport.is_closing():
            self.flow.held = False
            self._take(self._take_ahead())
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_whether_it_reads()
        if self.address is not None:
            self.bounds.hold_unread(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self.bounds.unread.pop(self, None)

    def _look_whether_it_reads(self) -> None:
        """An answer that is not taken stays in memory, and keeps even a connection open that was closed."""
        left = self.transport.get_write_buffer_size()
        if left and self._unread is None:
            self._unread = self.loop.call_later(self.bounds.client_seconds, self._look_again, left)

    def _look_again(self, before: int) -> None:
        self._unread = None
        seconds = self.bounds.client_seconds
        if self.transport.get_write_buffer_size() > before - seconds * MIN_READ_BYTES_PER_SECOND:
            self.bounds.note("client", f"{self.client} took nothing more of its answer for {seconds:g} s; dropped.")
            self.transport.abort()
        else:
            self._look_whether_it_reads()

    def _stop_looking(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _feed_head(self, data: bytes, more: bool) -> bool:
        """As much as a header may have; whether what follows (`more`) is to be parsed as well."""
        limit = self.bounds.header_bytes
        if self._head < limit:
            self._head += len(data)
            self._feed(data)
            if self._closing or self.transport.is_closing():
                return False
            if self._head < limit or not more:  # it was complete, or it may end here
                return True
        self._refuse("header_bytes", HeaderTooLargeError(f"The request's header has more than {limit} bytes."))
        return False

    def _feed(self, data: bytes) -> None:
        """A chunked body's framing and trailer are headers too: they must not go on without any of the body."""
        before = self._body
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse("invalid", InvalidRequestError("This is not a valid HTTP request."))
            return
        except httptools.HttpParserUpgrade:
            # the request is answered as if it had not asked for another protocol
            pass
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
        if bounds.refused >= MAX_CONNECTIONS_BEING_REFUSED:
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
