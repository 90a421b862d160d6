"""Background loops: repeat work, restart it after failures, and log a lasting problem once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from llmops.errors import LlmopsError

_log = logging.getLogger(__name__)


class LogOnce:
    """A logger of a problem that lasts: the problem is logged when it appears or changes, and when it ends."""

    def __init__(self, log: logging.Logger, level: int = logging.ERROR) -> None:
        self._log, self._level = log, level
        self._logged = ""

    def problem(self, message: str, *args: object) -> None:
        """Log the problem unless the same text was logged last. Arguments are those of `Logger.log`."""
        text = message % args if args else message
        if text != self._logged:
            self._logged = text
            self._log.log(self._level, "%s", text)

    def solved(self, message: str = "") -> None:
        """Forget the problem. Log `message` as a warning if there was one."""
        if self._logged and message:
            self._log.warning("%s", message)
        self._logged = ""


async def every(interval: float, work: Callable[[], Awaitable[object]], *, immediately: bool = False) -> NoReturn:
    """Run `work` again and again, until cancelled or until it raises.

    Args:
        interval: Seconds from the end of one run to the start of the next.
        work: The work.
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
    log: logging.Logger = _log,
) -> NoReturn:
    """Run `work` until cancelled. Log every failure, and start the work again after a growing pause.

    Args:
        name: The work's name in log messages.
        work: Work that does not end by itself.
        min_backoff: Seconds before the first restart. The pause doubles with each failure.
        max_backoff: The longest pause. Work that ran for longer restarts with the shortest pause.
        log: Where failures are logged.
    """
    pause, loop = min_backoff, asyncio.get_running_loop()
    while True:
        started = loop.time()
        try:
            await work()
            log.error("%s ended by itself", name)
        except LlmopsError as error:
            log.error("%s failed. %s", name, error.message)
        except Exception:
            log.exception("%s failed", name)
        if loop.time() - started > max_backoff:
            pause = min_backoff
        await asyncio.sleep(pause)
        pause = min(2 * pause, max_backoff)
