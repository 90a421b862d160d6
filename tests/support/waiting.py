"""Wait for what another thread, task or process is about to do, or for nothing: a clock that a test sets."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

#: Seconds that a test waits for something that always comes. Only tests that fail take so long.
GENEROUS = 120.0

#: Seconds between two looks at a condition.
INTERVAL = 0.01


async def eventually(
    condition: Callable[[], object | Awaitable[object]], what: str = "", *, seconds: float = GENEROUS
) -> None:
    """Wait until a condition holds, without blocking the event loop.

    Args:
        condition: A function, or a coroutine function, whose result is true once the condition holds.
        what: The condition in words, for the failure.
        seconds: The longest time to wait.

    Raises:
        AssertionError: The condition did not hold within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not (await held if inspect.isawaitable(held := condition()) else held):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        await asyncio.sleep(INTERVAL)


def wait_until(condition: Callable[[], object], what: str = "", *, seconds: float = GENEROUS) -> None:
    """Block until a condition holds. The arguments and the failure are those of `eventually`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(INTERVAL)


async def stop_tasks(*tasks: asyncio.Task) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
