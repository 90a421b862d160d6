"""A connection to Redis with nothing between it and a reply: the client's own streams and tasks take longer for each
command than all that is decided about a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hiredis import ProtocolError, Reader
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError


class Wire(asyncio.Protocol):
    """Takes over what redis-py has opened, with its password, database and TLS, once it has no reply to come.

    One command at a time. `over` is done when the connection is: with the reason, or without where `end` was told none.
    """

    def __init__(self, connection: AbstractConnection) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._reader = Reader(replyError=ResponseError)
        self._heard: Callable[[Any], None] | None = None
        self._transport: asyncio.Transport = connection._writer.transport  # type: ignore[union-attr,assignment]
        self._transport.set_protocol(self)

    def ask(self, command: bytes, heard: Callable[[Any], None]) -> None:
        """`heard` gets the reply, unless it is an error, which ends the connection."""
        self._heard = heard
        self._transport.write(command)

    def end(self, reason: Exception | None) -> None:
        if not self.over.done():
            if reason is None:
                self.over.set_result(None)
            else:
                self.over.set_exception(reason)

    async def close(self) -> None:
        with suppress(RedisError, OSError, asyncio.TimeoutError):
            await self._connection.disconnect(nowait=True)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            # False: not whole yet
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, ResponseError):
                    raise reply
                heard, self._heard = self._heard, None
                if heard is not None:
                    heard(reply)
        except (ProtocolError, ValueError, RedisError) as error:
            self.end(error if isinstance(error, RedisError) else RedisError(f"not a reply of Redis: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(exc if isinstance(exc, OSError) else ConnectionError("it closed the connection"))
