"""HTTP clients that untrusted servers cannot slow down, and cancelled requests cannot use up.

httpx parses all bytes of a read before other tasks run. In a read of 64 KiB, a server can send
2,600 informational responses or 11,000 chunks of one byte, which take 0.1 s to parse, and the
server can repeat this without end.

httpcore loses a connection if `Task.cancel()` comes just before the request is sent, or while the
response is closed (https://github.com/encode/httpcore/issues/1093). Lost connections stay open and
count against the limit of connections, until no request finds a connection any longer.
"""

import asyncio
from collections.abc import Coroutine
from time import perf_counter
from typing import Any

import httpcore
import httpx

#: Maximum number of bytes of one read. The most expensive 2 KiB take 3 ms to parse.
READ_BYTES = 2048
#: Seconds of parsing after which a connection pauses. A usual event of a stream takes 0.1 ms.
LONGEST_WORK = 0.001
#: Length of a pause as a multiple of the parsing time, so that a connection uses at most a fifth of
#: the event loop.
PAUSE_FACTOR = 4.0
#: Maximum seconds of a pause. A delay of 50 ms is hardly noticed in a stream.
LONGEST_PAUSE = 0.05


def fair_client(**options: Any) -> httpx.AsyncClient:
    """Return an `httpx.AsyncClient` with these options whose connections read in small pieces."""
    client = httpx.AsyncClient(**options)
    # httpx has no option for the network backend, and a custom transport would ignore the proxies
    # in the environment.
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.AsyncHTTPTransport):
            pool = transport._pool
            pool._network_backend = _FairBackend()
            pool.__class__ = type("_FairPool", (_FairPool, type(pool)), {})
    return client


class _FairPool(httpcore.AsyncConnectionPool):
    """A pool that keeps no connection of a cancelled request."""

    def _assign_requests_to_connections(self) -> list[httpcore.AsyncConnectionInterface]:
        used = {request.connection for request in self._requests}
        lost = [one for one in self._connections if one not in used and not (one.is_idle() or one.is_closed())]
        for connection in lost:
            self._connections.remove(connection)
        return [*lost, *super()._assign_requests_to_connections()]

    async def _close_connections(self, closing: list[httpcore.AsyncConnectionInterface]) -> None:
        if closing:
            await _finish(super()._close_connections(closing))

    async def handle_async_request(self, request: httpcore.Request) -> httpcore.Response:
        response = await super().handle_async_request(request)
        stream: Any = response.stream
        close = stream.aclose
        stream.aclose = lambda: _finish(close())
        return response


async def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, even if the caller is cancelled meanwhile."""
    await asyncio.shield(asyncio.get_running_loop().create_task(work))


class _FairBackend(httpcore.AsyncNetworkBackend):
    """A network backend of httpcore whose connections read in small pieces."""

    def __init__(self) -> None:
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _FairStream(await self._inner.connect_tcp(*args, **options))

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class _FairStream(httpcore.AsyncNetworkStream):
    """A connection that pauses before a read if parsing the last piece took long."""

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner
        # The time at which the last read returned, or 0 before a response.
        self._read_at = 0.0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        work = perf_counter() - self._read_at if self._read_at else 0.0
        if work > LONGEST_WORK:
            await asyncio.sleep(min(PAUSE_FACTOR * work, LONGEST_PAUSE))
        data = await self._inner.read(min(max_bytes, READ_BYTES), timeout)
        self._read_at = perf_counter()
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._read_at = 0.0
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _FairStream(await self._inner.start_tls(*args, **options))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
