"""Work that repeats in the background, and log lines that do not repeat."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Hashable

log = logging.getLogger(__name__)


class PeriodicTask:
    """A function that is called every `interval` seconds on the event loop. A call that fails is logged."""

    def __init__(self, name: str, function: Callable[[], Awaitable[object]], interval: float) -> None:
        self._name, self._function, self._interval = name, function, interval
        self._first_call = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, timeout: float = 0.0) -> None:
        """Start calling, and wait up to `timeout` seconds for the first call to end."""
        self._task = asyncio.create_task(self._run(), name=self._name)
        if timeout:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._first_call.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._function()
            except Exception:
                log.exception("%s failed, and will be tried again in %g s", self._name, self._interval)
            self._first_call.set()
            await asyncio.sleep(self._interval)


class LogOnce:
    """The problems that are in the log already, by what they are about."""

    def __init__(self) -> None:
        self._problems: dict[Hashable, str] = {}

    def is_new(self, key: Hashable, problem: str | None) -> bool:
        """Return True if `problem` differs from the last problem of `key`, and remember it. None: no problem."""
        if self._problems.get(key) == problem:
            return False
        if problem is None:
            del self._problems[key]
        else:
            self._problems[key] = problem
        return True
