"""The base of the leader's jobs: work that exactly one control process does at a time."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from llmops.background import cancel_tasks, supervised

log = logging.getLogger(__name__)

#: Seconds before a failed job is restarted: at first, and at most after repeated failures.
MIN_BACKOFF = 1.0
MAX_BACKOFF = 60.0


class LeaderJob(ABC):
    """A job of the leader, such as the ledger. Log lines begin with `name`."""

    name: str = ""

    @abstractmethod
    async def run(self) -> None:
        """Run until cancelled, then release all resources.

        After an exception, which is logged, the job is restarted.
        """


MakeJobs = Callable[[], Sequence[LeaderJob]]


async def run_jobs(jobs: Sequence[LeaderJob]) -> None:
    """Run all jobs until cancelled.

    Without jobs, wait until cancelled, because the process must remain the leader.
    """
    tasks = [
        asyncio.create_task(
            supervised(job.name, job.run, min_backoff=MIN_BACKOFF, max_backoff=MAX_BACKOFF, log=log), name=job.name
        )
        for job in jobs
    ]
    try:
        await asyncio.Event().wait()
    finally:
        await cancel_tasks(*tasks)
