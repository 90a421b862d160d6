"""uvicorn's HTTP protocol with limits on the bytes that a client can make the gateway hold.

The limits apply before the middleware sees a request. The parser keeps an incomplete header in
memory and scans the whole header again with each piece, so the parser must not receive more than a
header may have. The parser creates an object for each request, so it receives one request at a
time: bytes behind a request that is being answered stay unparsed, and the connection is read again
when the response is complete. Timers bound the time for a header, for a pause between requests, and
for reading a response.

uvicorn has no public interface for these limits, so pyproject.toml pins the versions of uvicorn.
"""

from __future__ import annotations

import asyncio
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
from llmops.gateway.http.connection_limits import UPLOAD, ConnectionLimits
from llmops.gateway.http.request_context import CONTEXT_KEY, client_network

#: Seconds until a rejected connection is closed, so that the client can read the error.
REJECTION_LINGER = 1.0
#: Seconds for a client to finish sending a request that has been answered already. Closing the
#: connection earlier would discard the response.
RESPONSE_LINGER = 10.0
#: Minimum number of bytes per second that a client must read of a pending response, so that its
#: connection is not closed.
MIN_READ_BYTES_PER_SECOND = 1024
#: Maximum number of connections that are being rejected at a time. Connections beyond it are closed
#: without a response, because each rejection holds a file descriptor for REJECTION_LINGER.
MAX_CONNECTIONS_BEING_REJECTED = 64
#: Number of bytes behind a request that is being answered, per connection, up to which the
#: connection is still read. Reading shows whether the client has disconnected, and some clients
#: send a blank line after a request.
MAX_PIPELINED_BYTES = 4096
#: Maximum number of fields in a header. Each field costs two objects, so a header of short fields
#: takes twenty times its size in memory.
MAX_HEADER_FIELDS = 256
#: Size of a header, in bytes, up to which it is not counted as large. Nearly all headers are
#: smaller.
SMALL_HEADER = 4096
#: Minimum number of bytes of a chunked body that are parsed at a time, if as many have arrived. A
#: piece ends at a blank line, which may be the end of the body; without the minimum, a body of
#: blank lines would cost a call for each.
MIN_CHUNKED_FEED = 1024
#: Maximum number of bytes of a chunked body that are parsed at a time. Afterwards the size of the
#: framing is compared with the size of the content.
MAX_CHUNKED_FEED = 16384
END_OF_HEADER = b"\r\n\r\n"


def protocol_class(limits: ConnectionLimits) -> type[LimitedHttpProtocol]:
    """Return the class for uvicorn's setting `http`, which has one object per connection."""
    return type("LimitedHttpProtocolOfGateway", (LimitedHttpProtocol,), {"limits": limits})


class _HoldingFlowControl(FlowControl):
    """The flow control of uvicorn, except that reading does not resume while `held` is True."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class LimitedHttpProtocol(HttpToolsProtocol):
    """An HTTP connection of a client.

    Attributes:
        limits: The limits of all connections.
        flow: uvicorn's flow control of the connection.
        address: The network of the client, None for a connection that does not count.
        changed: The time at which the connection was opened, a request or a pause between requests
            began, or the client stopped reading, whichever was last.
        _head: Bytes received since the last request was complete, -1 within a request's body.
        _pipelined: The bytes received behind a request that is being answered.
        _length: The length of the body in bytes, 0 for a chunked body, None if it is not known yet.
        _body: The number of bytes of the body received so far.
        _parts: Content of the body that the parser has found and that uvicorn has not received yet.
        _framing: The number of bytes by which the framing of a chunked body exceeds its content so
            far.
        _closing: True once all further bytes are dropped.
        _large_header: The size of a large header whose body is incomplete, in bytes, else 0.
        _holds_header: True if the limits count the bytes of a header.
        _timer: Closes the connection if a header is late, or if the client keeps sending a request
            that has been answered.
        _unread_timer: Checks whether the client reads its response.
    """

    limits: ConnectionLimits
    flow: _HoldingFlowControl
    address: str | None = None
    changed = 0.0
    _head = 0
    _pipelined = b""
    _length: int | None = None
    _body = 0
    _parts: list[bytes]
    _framing = 0
    _closing = False
    _large_header = 0
    _holds_header = False
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    @property
    def progress(self) -> int | None:
        """Return the progress of the connection's next request.

        The number is 0 before the first request, 1 between requests, 2 within a request or while
        its caller is unknown, UPLOAD within a request of a caller with a key, and None during a
        response.
        """
        if self.cycle is None:
            return 0
        if self.cycle.response_complete:
            return 1
        context: Any = self.cycle.scope.get(CONTEXT_KEY)
        if context is not None and context.unauthenticated:
            return 2
        if self._head >= 0:
            return None
        return UPLOAD if context is not None and context.caller.tenant_id else 2

    @property
    def _is_answering(self) -> bool:
        """Return True from the end of a request to the end of its response."""
        return self._head >= 0 and self.cycle is not None and not self.cycle.response_complete

    # -- connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _HoldingFlowControl(transport)
        self._parts = []
        self.changed = monotonic()
        if self.client is not None:
            address = client_network(self.client[0])
            reason = self.limits.reason_to_reject(transport.get_extra_info("socket").fileno(), address)
            if reason is not None:
                self._reject_connection(reason)
                return
            self.address = address
            self.limits.add(address, self)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        self._stop_timer()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        # uvicorn does not stop this timer after a reset, and the timer would keep the whole
        # connection in memory.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def evict(self) -> None:
        """Close the connection to make room for another connection."""
        self.limits.report("room", f"A connection from {self.address} was closed to make room for a new connection.")
        self._release()
        self._drop()

    def abort(self) -> None:
        """Close the connection at once and drop everything that its client has not read."""
        self.transport.abort()

    def _release(self) -> None:
        """Stop counting the connection and the bytes that it holds."""
        if self.address is not None:
            self.limits.remove(self.address, self)
            self.address = None
        self.limits.unread.pop(self, None)
        if self._holds_header:
            self._release_header()
        self._take_pipelined()

    def _drop(self) -> None:
        self._closing = True
        self._disconnect_cycle()
        self.transport.abort()

    def _disconnect_cycle(self) -> bool:
        """Tell the endpoint of a running request that the client has disconnected.

        Return True if the response to that request has started.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return bool(cycle.response_started)

    # -- requests

    def data_received(self, data: bytes) -> None:
        """Parse request by request, and stop at a request whose response is not complete."""
        if self._closing:
            return
        if self._pipelined:
            self._keep_pipelined(self._take_pipelined() + data)
            return
        start, size = 0, len(data)
        while start < size:
            if self._is_answering:
                self._keep_pipelined(data[start:] if start else data)
                return
            end = self._end_of_piece(data, start)
            piece = data if end - start == size else data[start:end]
            if self._head < 0:
                self._feed(piece)
            elif not self._feed_head(piece, more=end < size):
                return
            start = end
            if self._closing or self.transport.is_closing():
                return
        if self._head > 0 and self._timer is None:
            self._start_header_timer()
        size = self._head if self._head > 0 else self._large_header
        if size > SMALL_HEADER and self.address is not None:
            self._holds_header = True
            self.limits.hold_header(self, size)

    def _release_header(self) -> None:
        self._holds_header = False
        self.limits.unfinished.release(self)

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Return the offset in `data` up to which the parser may read from offset `start` on.

        The bytes up to the returned offset contain the end of at most one request.
        """
        size = len(data)
        if self._head >= 0:
            end = data.find(END_OF_HEADER, start) + len(END_OF_HEADER)
            return min(end if end > start else size, start + max(self.limits.header_bytes - self._head, 1))
        if self._length is None:
            length = next((value for name, value in self.headers if name == b"content-length"), b"")
            # Python converts at most 4,300 digits, and the parser accepts any number of zeros.
            self._length = int(length.lstrip(b"0") or b"0") if length.isdigit() else 0
        if self._length:
            return min(size, start + max(self._length - self._body, 1))
        most = min(size, start + MAX_CHUNKED_FEED)
        end = data.find(END_OF_HEADER, start + MIN_CHUNKED_FEED, most)
        return most if end < 0 else end + len(END_OF_HEADER)

    def _feed_head(self, data: bytes, *, more: bool) -> bool:
        """Parse a piece of a header, up to the maximum size of a header.

        Return True if the bytes behind the piece are to be parsed too; `more` is True if such
        bytes exist.
        """
        limit = self.limits.header_bytes
        if self._head < limit:
            self._head += len(data)
            self._feed(data)
            if self._closing or self.transport.is_closing():
                return False
            if self._head < limit or not more:  # The header was complete, or may end here.
                return True
        self._reject_request(
            "header_bytes",
            HeaderTooLargeError(f"The request's header has more than {limit} bytes; send fewer or shorter fields."),
        )
        return False

    def _feed(self, data: bytes) -> None:
        """Parse a piece of a request. Drop the connection if a chunked body is mostly framing.

        Each chunk costs a call, and uvicorn would copy the whole body for each chunk.
        """
        before, is_within = self._body, self._head < 0
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if self._head >= 0 and len(self.headers) >= MAX_HEADER_FIELDS:
                error = HeaderTooLargeError(
                    f"The request's header has more than {MAX_HEADER_FIELDS} fields; send fewer."
                )
                self._reject_request("header_bytes", error)
            else:
                self._reject_request(
                    "invalid", InvalidRequestError("This is not a valid HTTP request; send HTTP/1.1 without TLS.")
                )
            return
        except httptools.HttpParserUpgrade:
            # The request is answered over HTTP/1.1; the gateway supports no other protocol.
            pass
        if self._parts:
            body, self._parts = b"".join(self._parts), []
            super().on_body(body)
        if not is_within or self._head >= 0 or self._length:
            return
        self._framing = max(0, self._framing + len(data) - 2 * (self._body - before))
        if self._framing > self.limits.header_bytes and not self.transport.is_closing():
            self.limits.report(
                "header_bytes", "A request's chunks have much more framing than content; its connection was closed."
            )
            self.transport.abort()

    def _keep_pipelined(self, data: bytes) -> None:
        self._pipelined = data
        self.limits.hold_pipelined(self, len(data))
        if len(data) > MAX_PIPELINED_BYTES:
            self.flow.pause_reading()
            self.flow.held = True

    def _take_pipelined(self) -> bytes:
        data, self._pipelined = self._pipelined, b""
        self.limits.pipelined.release(self)
        return data

    def on_message_begin(self) -> None:
        self._head = self._head or 1
        self.changed = monotonic()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head < 0:
            # Fields of a trailer are ignored, because they must not be taken for fields of the
            # header.
            return
        if len(self.headers) >= MAX_HEADER_FIELDS:
            raise ValueError("too many fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._large_header = self._head if self._head > SMALL_HEADER else 0
        self._head = -1
        self._body = self._framing = 0
        self._length = None
        self._stop_timer()
        super().on_headers_complete()
        if self._large_header:
            # uvicorn would keep the large header in memory until the next request.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._parts:
            body, self._parts = b"".join(self._parts), []
            super().on_body(body)
        self._head = self._large_header = 0
        if self._holds_header:
            self._release_header()
        self._stop_timer()
        super().on_message_complete()

    # -- responses

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.changed = monotonic()
        if self._head < 0 and self.cycle.response_complete and not self.transport.is_closing():
            # Closing the connection at once would discard the response of a client that is still
            # sending.
            self._timer = self.loop.call_later(RESPONSE_LINGER, self.transport.close)
        self._watch_unread()
        if self._pipelined and not self.transport.is_closing():
            self.limits.queue_pipelined(self)

    def read_pipelined(self) -> None:
        """Parse the bytes that arrived behind the request that has been answered."""
        if self._pipelined and not self.transport.is_closing():
            self.flow.held = False
            self.data_received(self._take_pipelined())
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.changed = monotonic()
        self._watch_unread()
        if self.address is not None:
            self.limits.hold_unread(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self.limits.unread.pop(self, None)

    def _watch_unread(self) -> None:
        """Start a timer if the client has not read all output.

        Unread output stays in memory, and keeps even a closed connection open.
        """
        unread = self.transport.get_write_buffer_size()
        if unread and self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.limits.client_seconds, self._check_unread, unread)

    def _check_unread(self, before: int) -> None:
        self._unread_timer = None
        seconds = self.limits.client_seconds
        if self.transport.get_write_buffer_size() > before - seconds * MIN_READ_BYTES_PER_SECOND:
            self.limits.report(
                "client", f"{self.client} did not read its response for {seconds:g} s; its connection was closed."
            )
            self.transport.abort()
        else:
            self._watch_unread()

    # -- rejections

    def _start_header_timer(self) -> None:
        self._timer = self.loop.call_later(self.limits.header_seconds, self._header_timed_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _header_timed_out(self) -> None:
        self._timer = None
        if self._head > 0:
            seconds = self.limits.header_seconds
            late = RequestTimeoutError(
                f"The request's header was not complete after {seconds:g} s; send the request again."
            )
            self._reject_request("header", late)
        elif not self.transport.is_closing():
            self.transport.close()

    def _reject_request(self, reason: str, error: ApiError) -> None:
        self.limits.report(reason, f"A connection from {self.client} was closed: {error.message}")
        self._respond(error)
        self.loop.call_later(REJECTION_LINGER, self.transport.abort)

    def _reject_connection(self, reason: str) -> None:
        self.limits.report("connections", f"A new connection was rejected: {reason}.")
        if self.limits.rejecting >= MAX_CONNECTIONS_BEING_REJECTED:
            self._closing = True
            self.transport.abort()
            return
        self.limits.rejecting += 1
        self._respond(
            UnavailableError("The gateway has no free connections; send the request again later.", code="overloaded")
        )
        self.loop.call_later(REJECTION_LINGER, self._end_rejection)

    def _end_rejection(self) -> None:
        self.limits.rejecting -= 1
        self.transport.abort()

    def _respond(self, error: ApiError) -> None:
        """Write the error response and close the connection for writing.

        Bytes that still arrive are dropped. Closing the connection for reading would reset it, and
        the reset would overtake the response.
        """
        self._closing = True
        if self._disconnect_cycle():
            self.transport.abort()
            return
        body = error.body_json()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**error.headers(), **headers}.items())
        self.transport.write(f"HTTP/1.1 {error.status} {error.phrase}\r\n{lines}\r\n".encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
