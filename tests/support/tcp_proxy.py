"""A TCP proxy whose connections can be cut."""

import asyncio
import sys
from collections.abc import Callable, Iterable
from typing import Self


class TcpProxy:
    """A proxy in front of a server, on a free port of the loopback."""

    def __init__(self, target: str, limit: Callable[[], int] = lambda: sys.maxsize) -> None:
        """Create a proxy for `target`. A connection is reset after `limit()` bytes of the server."""
        #: The server of new connections.
        self.target = target
        self._limit = limit
        self._writers: set[asyncio.StreamWriter] = set()
        self.cuts = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        _abort(self._writers)
        self._server.close()

    def cut(self) -> None:
        """Reset all connections."""
        self.cuts += 1
        _abort(self._writers)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self.target.rsplit(":", 1))
        pair = {writer, up_writer}

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, left: int) -> None:
            while data := await source.read(65536):
                sink.write(data[:left])
                await sink.drain()
                left -= len(data)
                if left <= 0:
                    self.cuts += 1
                    _abort(pair)
                    return
            sink.close()

        self._writers |= pair
        pumps = pump(reader, up_writer, sys.maxsize), pump(up_reader, writer, self._limit())
        await asyncio.gather(*pumps, return_exceptions=True)
        self._writers -= pair


def _abort(writers: Iterable[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.transport.abort()
