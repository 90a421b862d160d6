"""Clocks: the time of day, what a thread has left of the processor's, and how long something may be waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

utc_now: Callable[[], datetime] = partial(datetime.now, UTC)


class CpuBudget:
    """Seconds of CPU that a thread has left. They go on in a thread whose virtual machine stands still, so what passes
    between two looks counts as `longest` at most."""

    __slots__ = ("_clock", "_left", "_longest", "_looked")

    def __init__(self, seconds: float, longest: float, clock: Callable[[], float]) -> None:
        self._left, self._longest, self._clock, self._looked = seconds, longest, clock, clock()

    def is_over(self) -> bool:
        now = self._clock()
        self._left -= min(now - self._looked, self._longest)
        self._looked = now
        return self._left < 0


async def wait_with_timeout(seconds: float, work: Awaitable[T]) -> T:
    """As `asyncio.wait_for` is since Python 3.12: before, a cancellation that comes as `work` ends is lost, and a loop
    that was to end goes on for good.

    Raises asyncio.TimeoutError, once `work` has ended.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _cancel_and_wait(task)
        raise
    if not done:
        await _cancel_and_wait(task)
        raise TimeoutError
    return task.result()


async def _cancel_and_wait(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
