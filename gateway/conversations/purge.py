"""The background purge of conversations that were deleted long ago or have expired."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from llmops.gateway.errors import ApiError

if TYPE_CHECKING:
    from llmops.gateway.conversations.conversation_store import ConversationStore

log = logging.getLogger(__name__)

#: Seconds between two purges. Several gateways of one store may purge at once: the second finds
#: nothing to do.
PURGE_INTERVAL = 6 * 3600.0
#: Seconds before the first purge: the start of a gateway has more urgent work.
START_DELAY = 60.0


class PurgeTask:
    """A background task that purges conversations."""

    def __init__(self, store: Callable[[], Awaitable[ConversationStore]]) -> None:
        self._store = store
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="purge-conversations")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        await asyncio.sleep(START_DELAY)
        while True:
            try:
                purged = await (await self._store()).prune()
                if purged:
                    log.info("Purged %d conversations.", purged)
            except ApiError as error:
                log.warning("Conversations were not purged: %s", error.full_message)
            await asyncio.sleep(PURGE_INTERVAL)
