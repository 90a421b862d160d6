"""Tasks that repeat or are shared, and log lines that are written once per problem."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from time import monotonic
from typing import Any, Generic, NoReturn, TypeVar

from llmops.errors import LlmopsError

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Maximum number of readiness checks of all servers, and of renderings of the metrics page, per
#: second. Bounds the load of both, however many clients ask.
STATUS_CHECKS_PER_SECOND = 10
#: Seconds after which a task that is still running after a cancellation is cancelled again: long
#: enough for most cleanups, short enough for a quick shutdown.
CANCEL_INTERVAL = 1.0


async def cancel_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks until they have ended. Skip None, which stands for a task that was not started.

    One cancellation can be too few, because libraries can swallow a cancellation: a database driver
    that is connecting, and redis-py while it sends (`asyncio.wait_for` before Python 3.12).
    """
    started = [task for task in tasks if task is not None]
    while running := [task for task in started if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_INTERVAL)
    await asyncio.gather(*started, return_exceptions=True)


class SingleFlight(Generic[T]):
    """The shared result of an asynchronous function that runs once at a time.

    The function runs at most `per_second` times each second. A caller during a run receives the
    result of that run. A caller beyond `per_second` receives the last result.
    """

    def __init__(self, function: Callable[[], Awaitable[T]], per_second: int) -> None:
        self._function, self._per_second = function, per_second
        self._second, self._left = -1, 0
        self._last: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """Return the result of a run. Errors of the function are raised."""
        second = int(monotonic())
        if second != self._second:
            self._second, self._left = second, self._per_second
        last = self._last
        if last is None or (last.done() and self._left > 0):
            self._left -= 1
            last = self._last = asyncio.ensure_future(self._function())
        # A caller that is cancelled must not cancel the run that other callers wait for.
        return await asyncio.shield(last)


class TaskSet:
    """A set of running tasks.

    The set holds references, so that the garbage collector does not remove a task before its end.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Wait until all tasks have returned, failed or been cancelled. Raise none of their errors."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        await cancel_tasks(*self._tasks)


class PeriodicTask:
    """A function that is called every `interval` seconds. A call that fails is logged."""

    def __init__(self, name: str, function: Callable[[], Awaitable[object]], interval: float) -> None:
        self._name, self._function, self._interval = name, function, interval
        self._first_call, self._is_due = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, timeout: float = 0.0) -> None:
        """Start the task, and wait up to `timeout` seconds for the function's first call to end."""
        self._task = asyncio.create_task(self._run(), name=self._name)
        if timeout:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._first_call.wait()

    def call_soon(self) -> None:
        """Call the function now, or as soon as the current call has ended."""
        self._is_due.set()

    async def close(self) -> None:
        await cancel_tasks(self._task)

    async def _run(self) -> None:
        while True:
            try:
                await self._function()
            except Exception:
                log.exception("%s failed; the next attempt is in %g s", self._name, self._interval)
            self._first_call.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._is_due.wait()
            self._is_due.clear()


class LogOnce:
    """A filter for the log that passes each problem once.

    A key identifies the subject of a problem.
    """

    def __init__(self) -> None:
        self._problems: dict[Hashable, str] = {}

    def is_new(self, key: Hashable, problem: str | None) -> bool:
        """Return True if the problem of `key` differs from the last one, and store the problem.

        Args:
            key: The subject of the problem, such as a replica's name.
            problem: A description of the problem, or None if the subject has no problem.
        """
        if self._problems.get(key) == problem:
            return False
        if problem is None:
            del self._problems[key]
        else:
            self._problems[key] = problem
        return True


async def every(interval: float, work: Callable[[], Awaitable[object]], *, immediately: bool = False) -> NoReturn:
    """Run `work` repeatedly until this task is cancelled or `work` raises.

    Args:
        interval: Seconds from the end of one run to the start of the next.
        work: An async function without arguments.
        immediately: True if the first run starts now, instead of after `interval`.
    """
    if immediately:
        await work()
    while True:
        await asyncio.sleep(interval)
        await work()


async def supervised(
    name: str,
    work: Callable[[], Awaitable[object]],
    *,
    min_backoff: float = 1.0,
    max_backoff: float = 60.0,
    log: logging.Logger = log,
) -> NoReturn:
    """Run `work` until this task is cancelled, and restart `work` whenever it ends.

    Every end is logged as an error. The pause before a restart doubles each time.

    Args:
        name: The name of the work in log messages.
        work: An async function that is not expected to return.
        min_backoff: Seconds before the first restart.
        max_backoff: Maximum seconds before a restart. After a run that lasted longer than this, the
            pause is `min_backoff` again.
        log: The logger of the errors.
    """
    pause, loop = min_backoff, asyncio.get_running_loop()
    while True:
        started = loop.time()
        try:
            await work()
            log.error("%s ended without an error, and will be restarted", name)
        except LlmopsError as error:
            log.error("%s failed. %s", name, error.message)
        except Exception:
            log.exception("%s failed", name)
        if loop.time() - started > max_backoff:
            pause = min_backoff
        await asyncio.sleep(pause)
        pause = min(2 * pause, max_backoff)
