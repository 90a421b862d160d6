"""The UTC time, calendar periods, the CPU budget of a thread, and a wait with a timeout."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar

T = TypeVar("T")

utc_now: Callable[[], datetime] = partial(datetime.now, UTC)


def period_start(now: datetime, period: str) -> datetime:
    """Return the start of the UTC period that contains `now`.

    Args:
        now: A time with a time zone.
        period: `day`, `week` (which starts on Monday) or `month`.
    """
    midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "week":
        return midnight - timedelta(days=midnight.weekday())
    return midnight.replace(day=1) if period == "month" else midnight


class CpuBudget:
    """A CPU-time budget of one thread.

    The time between two checks counts as at most `longest` seconds, because the CPU clock of a
    paused virtual machine can continue to run.
    """

    __slots__ = ("_checked_at", "_clock", "_left", "_longest")

    def __init__(self, seconds: float, longest: float, clock: Callable[[], float]) -> None:
        """Start the budget.

        Args:
            seconds: CPU seconds that the thread may use.
            longest: Maximum number of seconds that count between two checks.
            clock: A function that returns the thread's CPU time in seconds.
        """
        self._left, self._longest, self._clock, self._checked_at = seconds, longest, clock, clock()

    def is_over(self) -> bool:
        """Return True if the thread has used its budget."""
        now = self._clock()
        self._left -= min(now - self._checked_at, self._longest)
        self._checked_at = now
        return self._left < 0


async def wait_with_timeout(seconds: float, work: Awaitable[T]) -> T:
    """Await `work`. After `seconds`, cancel `work`, wait for its end, and raise TimeoutError.

    A cancellation of the caller is always raised, also if `work` ends or fails at the same moment,
    so that the caller's loop ends. `asyncio.wait_for` loses such a cancellation before Python 3.12,
    and `asyncio.timeout` raises the error of `work` instead.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise TimeoutError
    except (asyncio.CancelledError, TimeoutError):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    return task.result()
