"""The retention job, which deletes old audit entries and dead letters."""

import logging
from datetime import datetime, timedelta

from llmops.background import every
from llmops.clocks import utc_now
from llmops.control.leader_jobs import LeaderJob
from llmops.store.audit import prune_audit
from llmops.store.database import Store
from llmops.store.dead_letters import prune_dead_letters
from llmops.store.factory import open_store

log = logging.getLogger(__name__)

#: Seconds between two deletions. Entries are kept for days, so a later deletion does no harm.
PRUNE_INTERVAL = 6 * 3600.0


class Retention(LeaderJob):
    """The job that deletes entries older than `days`, at its start and every PRUNE_INTERVAL."""

    name = "The retention"

    def __init__(self, store: str, days: int) -> None:
        self._store, self._age = store, timedelta(days=days)

    async def run(self) -> None:
        """Delete old entries until cancelled. Raises the errors of `open_store`."""
        await every(PRUNE_INTERVAL, self._prune, immediately=True)

    async def _prune(self) -> None:
        async with await open_store(self._store, pool_size=1) as store:
            entries, letters = await prune_expired(store, utc_now(), self._age)
        if entries or letters:
            days = self._age.days
            log.info("Deleted %d audit entries and %d dead letters older than %d days.", entries, letters, days)


async def prune_expired(store: Store, now: datetime, age: timedelta) -> tuple[int, int]:
    """Delete entries older than `age`. Return the numbers of audit entries and dead letters."""
    entries = 0
    while True:
        async with store.write() as connection:
            deleted = await prune_audit(connection, now - age)
        entries += deleted
        if not deleted:
            break
    async with store.write() as connection:
        return entries, await prune_dead_letters(connection, now - age)
