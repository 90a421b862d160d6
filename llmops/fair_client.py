"""HTTP clients for servers of others, whose responses leave the event loop to other requests.

httpx parses all that it has read before anything else runs. In 64 KiB, a server can send 2,600
informational responses or 11,000 chunks of one byte, which take 0.1 s, and it can go on for ever.
"""

import asyncio
from time import perf_counter
from typing import Any

import httpcore
import httpx

#: Bytes that are parsed at once: the worst take 3 ms.
READ_BYTES = 2048
#: Seconds of parsing after which a connection pauses. An event of a stream takes 0.1 ms.
LONGEST_WORK = 0.001
#: Length of a pause, as a multiple of the time that parsing took, and at most in seconds.
PAUSE_FACTOR, LONGEST_PAUSE = 4.0, 0.05


def fair_client(**options: Any) -> httpx.AsyncClient:
    """Return an `httpx.AsyncClient` with these options whose connections read in small pieces."""
    client = httpx.AsyncClient(**options)
    # httpx has no option for it, and a transport of ours would not use the environment's proxies
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.AsyncHTTPTransport):
            transport._pool._network_backend = _FairBackend()
    return client


class _FairBackend(httpcore.AsyncNetworkBackend):
    """Connections of httpcore's own backend that read in small pieces."""

    def __init__(self) -> None:
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _FairStream(await self._inner.connect_tcp(*args, **options))

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class _FairStream(httpcore.AsyncNetworkStream):
    """A connection that pauses when parsing what it has read took long."""

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner
        # when the last read returned; 0 before a response
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
