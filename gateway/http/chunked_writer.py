"""The short path of event streams to the client: around the middlewares, without a coroutine per write.

Middlewares have nothing to do with single tokens, and ASGI's `send` is a coroutine that examines every message.
This writes to uvicorn's connection directly, in the one encoding that event streams use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

SERVER_SEND_KEY, WRITE_BATCH_KEY = "llmops.server_send", "llmops.burst"


class WriteBatch:
    """Collects the writes of one event loop iteration: what an engine step sends to all clients is first rendered,
    then written. Each phase stays in the CPU caches, and clients on this machine preempt it less often.
    """

    def __init__(self) -> None:
        self._writes: list[tuple[Callable[[bytes], None], bytes]] = []

    def add(self, write: Callable[[bytes], None], data: bytes) -> None:
        if not self._writes:
            asyncio.get_running_loop().call_soon(self.flush)
        self._writes.append((write, data))

    def flush(self) -> None:
        writes, self._writes = self._writes, []
        for write, data in writes:
            try:
                write(data)
            except RuntimeError:
                # uvloop's, of a connection that an earlier write found closed: the others are not
                continue


def server_send(scope: Scope, send: Send) -> Send:
    """The server's own `send`, or `send` where the application runs without a Door around it."""
    found: Send = scope.get(SERVER_SEND_KEY, send)
    return found


class ChunkedWriter:
    """A connection whose answer has begun; parts of its body can be written at any time unless it is `blocked`."""

    __slots__ = ("_burst", "_cycle", "_flow", "_write", "wrote")

    def __init__(self, cycle: RequestResponseCycle, burst: WriteBatch) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write
        self._burst = burst
        # reset by the reader who checks for recent writes
        self.wrote = False

    @property
    def blocked(self) -> bool:
        """The client is not reading, so the buffer is full (`send` waits), or has left (`send` does nothing)."""
        return self._flow.write_paused or self._cycle.disconnected

    def write(self, data: bytes) -> None:
        """One chunk (RFC 9112, 7.1) in one write. `data` must not be empty, which would end the body."""
        self.wrote = True
        self._burst.add(self._write, b"%x\r\n%b\r\n" % (len(data), data))

    def flush(self) -> None:
        """Perform the pending writes. Needed before `send`: the coroutine that calls it may have been woken
        before the write, in the same loop iteration, and would overtake it."""
        self._burst.flush()

    def abort(self) -> None:
        """Drop the connection and everything the client has not read."""
        self._cycle.transport.abort()


def chunked_writer_of(scope: Scope) -> ChunkedWriter | None:
    """A writer around the server's own `send`; None unless it is uvicorn's with httptools and the body is chunked."""
    cycle = getattr(scope.get(SERVER_SEND_KEY), "__self__", None)
    if isinstance(cycle, RequestResponseCycle) and cycle.chunked_encoding and scope["method"] != "HEAD":
        return ChunkedWriter(cycle, scope[WRITE_BATCH_KEY])
    return None
