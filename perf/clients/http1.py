"""A minimal HTTP/1.1 client on asyncio and httptools.

A load generator spends CPU per chunk, not per request, and shares the machine with the server under
test. This client uses a fraction of the CPU of httpx or aiohttp per streamed chunk, and takes the
time when bytes arrive instead of when a task wakes up.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from llmops.errors import InputError
from llmops.urls import without_secrets

#: Maximum number of successive bytes without any part of a body: headers, informational responses
#: and trailers.
MAX_HEADER_BYTES = 2**18


class ResponseHandler(Protocol):
    """A receiver of one response.

    Either `failed` or `complete` is called exactly once, at the end.
    """

    def headers(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def body(self, data: bytes, now: float) -> None: ...

    def complete(self) -> None: ...

    def failed(self, kind: str) -> None: ...


class Connection(asyncio.Protocol):
    """A keep-alive connection for one request at a time."""

    def __init__(self, on_idle: Callable[[Connection], None]) -> None:
        self._on_idle = on_idle
        self._transport: asyncio.Transport | None = None
        self._sink: ResponseHandler | None = None
        self._now = 0.0
        self.used = 0
        self.answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transport of uvloop does not inherit from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, data: bytes, sink: ResponseHandler) -> None:
        assert self._transport is not None
        self._sink = sink
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._parser = httptools.HttpResponseParser(self)
        self.used += 1
        self.answered = False
        self._transport.write(data)

    def abort(self) -> None:
        """Close the connection at once, without calling the handler."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.answered = True
        if self._sink is None:
            self.abort()
            return
        self._header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("protocol")
        if self._header_bytes > MAX_HEADER_BYTES:
            self._fail("protocol")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._sink is None:
            return
        if exc is None and self.answered and self._until_close():
            self._finish()
        else:
            self._fail("disconnected")

    def _until_close(self) -> bool:
        # A body without a length ends with the connection.
        return b"content-length" not in self._headers and b"transfer-encoding" not in self._headers

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._is_informational():
            self._headers.clear()
        elif self._sink is not None:
            self._sink.headers(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        self._header_bytes = 0
        if self._sink is not None:
            self._sink.body(data, self._now)

    def on_message_complete(self) -> None:
        if self._is_informational():
            return
        keep = self._parser.should_keep_alive()
        self._finish()
        if keep and self.open:
            self._on_idle(self)
        elif self._transport is not None:
            self._transport.close()

    def _is_informational(self) -> bool:
        """Return True for an informational response, such as 103, before the final response."""
        return 100 <= self._parser.get_status_code() < 200

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.complete()

    def _fail(self, kind: str) -> None:
        sink, self._sink = self._sink, None
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.failed(kind)


class HttpClient:
    """A pool of keep-alive connections to one origin."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{without_secrets(url)!r} is not an HTTP URL; write http://HOST:PORT/v1.")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self.netloc = parts.netloc.rpartition("@")[2]
        self._idle: list[Connection] = []

    def idle(self) -> Connection | None:
        """Return an open connection without a request, or None."""
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def connect(self) -> Connection:
        """Open and return a new connection. Raise OSError if the server cannot be reached."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._idle.append), self._host, self._port, ssl=self._ssl
        )
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()


def render(method: str, path: str, netloc: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """Return the bytes of one HTTP request."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {netloc}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
