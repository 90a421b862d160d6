"""What one control process does at a time, whichever of several it is."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from llmops.errors import LlmopsError

log = logging.getLogger(__name__)

# seconds until a duty that failed is begun again; twice as many each time, until it has held as long
MIN_BACKOFF, MAX_BACKOFF = 1.0, 60.0


class LeaderJob(ABC):
    """Work of the process that leads: the ledger, the reconciler. `name` is what logs call it."""

    name: str = ""

    @abstractmethod
    async def run(self) -> None:
        """Until it is cancelled, after which it holds nothing. What it raises is logged, and it is begun again."""


async def run_jobs(duties: Sequence[LeaderJob]) -> None:
    """Have all of them done, until this is cancelled."""
    tasks = [asyncio.create_task(_run_with_restarts(duty), name=duty.name) for duty in duties]
    try:
        # they do not end by themselves; also without any, who leads has to stay the leader
        await asyncio.Event().wait()
    finally:
        await cancel_tasks(tasks)


async def cancel_tasks(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel them until they are over: a driver that is just connecting can swallow a cancellation."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=1.0)


async def _run_with_restarts(duty: LeaderJob) -> None:
    pause, loop = MIN_BACKOFF, asyncio.get_running_loop()
    while True:
        begun = loop.time()
        try:
            await duty.run()
            log.error("%s ended by itself", duty.name)
        except LlmopsError as error:
            log.error("%s failed. %s", duty.name, error.message)
        except Exception:
            log.exception("%s failed", duty.name)
        if loop.time() - begun > MAX_BACKOFF:
            pause = MIN_BACKOFF
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_BACKOFF)
