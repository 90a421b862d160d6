"""The background purge of conversations that were deleted long ago or have expired."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from llmops.background import cancel_tasks
from llmops.clocks import utc_now
from llmops.gateway.errors import ApiError
from llmops.output_files import check_not_put_by_another

if TYPE_CHECKING:
    from llmops.gateway.conversations.conversation_store import Branch, ConversationStore

log = logging.getLogger(__name__)

#: Seconds between two purges. Several gateways of one store may purge at once: the second gateway
#: finds nothing to do.
PURGE_INTERVAL = 6 * 3600.0
#: Seconds before the first purge, because a starting gateway has more urgent work.
START_DELAY = 60.0


class PurgeTask:
    """A background task that purges conversations."""

    def __init__(self, store: Callable[[], Awaitable[ConversationStore]], archive: Path | None) -> None:
        """Create the task.

        Expired conversations are archived to the folder `archive`, if it is given, before they are
        purged.
        """
        self._store, self._archive = store, archive
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="purge-conversations")

    async def close(self) -> None:
        await cancel_tasks(self._task)

    async def _run(self) -> None:
        await asyncio.sleep(START_DELAY)
        while True:
            try:
                purged = await self.purge()
                if purged:
                    log.info("Purged %d conversations.", purged)
            except ApiError as error:
                log.warning("Conversations were not purged now; the gateway retries later: %s", error.full_message)
            except OSError as error:
                log.error(
                    "Conversations are not purged, because %s cannot be written (%s); correct conversations.archive.",
                    self._archive,
                    error.strerror or error,
                )
            except Exception:
                log.exception(
                    "Conversations were not purged because of an unexpected error; the gateway retries later."
                )
            await asyncio.sleep(PURGE_INTERVAL)

    async def purge(self) -> int:
        """Purge deleted and expired conversations, and return their number.

        Raises:
            ApiError: The store is unavailable.
            OSError: The archive cannot be written; conversations that must be archived are kept.
        """
        store = await self._store()
        if self._archive is None:
            return await store.prune()
        from llmops.gateway.conversations.conversation_json import export_line

        self._archive.mkdir(parents=True, exist_ok=True)
        check_not_put_by_another(self._archive)
        # Each purge writes a new file, because several gateways may purge at once.
        path = self._archive / f"{utc_now():%Y-%m-%dT%H%M%SZ}-{secrets.token_hex(4)}.jsonl"
        with ExitStack() as stack:
            file: list[IO[bytes]] = []

            def archive(branch: Branch) -> None:
                if not file:
                    file.append(stack.enter_context(open(path, "xb", opener=partial(os.open, mode=0o600))))
                file[0].write(export_line(branch))
                file[0].flush()

            def sync() -> None:
                for one in file:
                    os.fsync(one.fileno())

            return await store.prune(archive, sync)
