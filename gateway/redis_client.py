"""The connection to a Redis, which may be another program that answers at its address."""

from __future__ import annotations

from typing import Any

from redis._parsers import _AsyncRESP2Parser
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

#: What a call raises if Redis is away, or if its reply is not one of Redis.
FAILURES = (RedisError, OSError, ValueError, EOFError, RecursionError)


def connect(url: str, timeout: float, connect_timeout: float, **options: Any) -> Redis:
    """Return a client that reads a reply for at most `timeout` seconds, and sends nothing twice.

    The parser is not hiredis: that makes room for as many elements as a reply announces, and takes
    20 s, which a time-out does not end, to give back the room for 2**31.
    """
    return Redis.from_url(
        url,
        protocol=2,
        parser_class=_AsyncRESP2Parser,
        socket_timeout=timeout,
        socket_connect_timeout=connect_timeout,
        retry=Retry(NoBackoff(), 0),
        **options,
    )
