"""Connection to a Redis server, which may be another program that answers at the address."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from redis._parsers import _AsyncRESP2Parser
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from llmops.errors import InputError

#: Exceptions of a call if Redis cannot be reached, or if the server's reply is not a Redis reply.
FAILURES = (RedisError, OSError, ValueError, EOFError, RecursionError)


def connect(url: str, timeout: float, connect_timeout: float, **options: Any) -> Redis:
    """Return a client that waits at most `timeout` seconds for a reply and never repeats a command.

    The parser is not hiredis. hiredis allocates memory for as many elements as a reply announces,
    and for 2**31 elements takes 20 s to free the memory, during which no time-out works.

    Args:
        url: The URL of the server.
        timeout: The seconds to wait for a reply.
        connect_timeout: The seconds to wait for a connection.
        options: Further arguments of `Redis.from_url`.

    Raises:
        InputError: An option in the URL's query is unknown, or its value is invalid.
    """
    try:
        client = Redis.from_url(
            url,
            protocol=2,
            parser_class=_AsyncRESP2Parser,
            socket_timeout=timeout,
            socket_connect_timeout=connect_timeout,
            retry=Retry(NoBackoff(), 0),
            **options,
        )
        # The options of the URL are read when a connection is made, not when it is opened.
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError, RedisError) as error:
        raise InputError(f"redis: the URL has an option that cannot be used ({error}); correct or remove it.") from None
    return client


async def reconnect(client: Redis) -> None:
    """Close the client's connections, so that the next command makes a new one.

    After a failover, an old connection is to a server that refuses to write. Connections in use
    stay open, because the library raises an AttributeError in a command that is connecting. A
    client of a single connection must run no command meanwhile.
    """
    with suppress(*FAILURES):
        await client.connection_pool.disconnect(inuse_connections=client.single_connection_client)
