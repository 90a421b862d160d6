"""Retention: entries of the audit log and parked events are deleted when they are old enough."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta

from llmops.clocks import utc_now
from llmops.control.leader_jobs import LeaderJob
from llmops.store.audit import prune_audit
from llmops.store.database import Store
from llmops.store.dead_letters import prune_dead_letters
from llmops.store.factory import open_store

log = logging.getLogger(__name__)

#: Seconds between two looks for old entries.
PRUNE_INTERVAL = 6 * 3600.0


class Retention(LeaderJob):
    """Deletes what is older than `days`, when the process begins to lead and every six hours."""

    name = "The retention"

    def __init__(self, store: str, days: int, every: float = PRUNE_INTERVAL) -> None:
        self._url, self._age, self._every = store, timedelta(days=days), every

    async def run(self) -> None:
        """Raises as `open_store` does."""
        while True:
            async with await open_store(self._url, pool_size=1) as store:
                audited, parked = await prune_expired(store, utc_now(), self._age)
            if audited or parked:
                days = self._age.days
                log.info("Deleted %d audit entries and %d parked events older than %d days.", audited, parked, days)
            await asyncio.sleep(self._every)


async def prune_expired(store: Store, now: datetime, age: timedelta) -> tuple[int, int]:
    """Delete what is older than `age`. Return the numbers of audit entries and of parked events."""
    audited = 0
    while True:
        async with store.write() as connection:
            deleted = await prune_audit(connection, now - age)
        audited += deleted
        if not deleted:
            break
    async with store.write() as connection:
        return audited, await prune_dead_letters(connection, now - age)
