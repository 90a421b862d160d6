"""A writer of event streams that bypasses ASGI, so that no coroutine runs per write.

The writer passes chunks to uvicorn's connection directly. ASGI's `send` is a coroutine that
examines every message, and middleware has nothing to do with single tokens. The writer supports
only chunked transfer encoding, which all event streams have (docs/decisions/0003).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

#: Keys of the ASGI scope under which the middleware stores the server's `send` and the batch of
#: writes.
SERVER_SEND_KEY, WRITE_BATCH_KEY = "llmops.server_send", "llmops.write_batch"


class WriteBatch:
    """A batch of the writes of one event loop iteration.

    All tokens of an engine step are rendered first, and then all are written. Each phase stays in
    the CPU caches, and clients on the same machine preempt the gateway less often.
    """

    def __init__(self) -> None:
        self._writes: list[tuple[Callable[[bytes], None], bytes]] = []

    def add(self, write: Callable[[bytes], None], data: bytes) -> None:
        """Call `write` with `data` at the end of the current event loop iteration."""
        if not self._writes:
            asyncio.get_running_loop().call_soon(self.flush)
        self._writes.append((write, data))

    def flush(self) -> None:
        """Perform all collected writes now."""
        writes, self._writes = self._writes, []
        for write, data in writes:
            try:
                write(data)
            except RuntimeError:
                # uvloop raises for a connection that was closed since. The other writes must go on.
                continue


class ChunkedWriter:
    """A writer to a connection whose response has started.

    Chunks can be written at any time, unless the writer is `blocked`.

    Attributes:
        wrote: True after a write. The code that checks for recent writes sets it to False again.
        flush: Performs the pending writes. Must be called before `send`: the coroutine that calls
            `send` may have been woken before a write of the same iteration and would overtake it.
    """

    def __init__(self, cycle: RequestResponseCycle, batch: WriteBatch) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write
        self._batch, self.flush = batch, batch.flush
        self.wrote = False

    @property
    def blocked(self) -> bool:
        """Return True if the send buffer is full or the client has disconnected.

        The buffer is full if the client does not read.
        """
        return self._flow.write_paused or self._cycle.disconnected

    def write(self, data: bytes) -> None:
        """Write `data` as one chunk (RFC 9112, 7.1).

        `data` must not be empty, because an empty chunk ends the body.
        """
        self.wrote = True
        self._batch.add(self._write, b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        """Close the connection at once and drop everything that the client has not read."""
        self._cycle.transport.abort()


def chunked_writer_of(scope: Scope) -> ChunkedWriter | None:
    """Return a writer for the response, or None if the connection does not support it.

    The server must be uvicorn with httptools, and the body must be chunked.
    """
    cycle = getattr(scope.get(SERVER_SEND_KEY), "__self__", None)
    if isinstance(cycle, RequestResponseCycle) and cycle.chunked_encoding and scope["method"] != "HEAD":
        return ChunkedWriter(cycle, scope[WRITE_BATCH_KEY])
    return None


def abort_response(send: Send) -> bool:
    """Close the connection of a response that cannot be completed, so that the client notices.

    Return False if the server is not uvicorn with httptools.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return False
    cycle.disconnected = True
    cycle.transport.abort()
    return True
