"""Looking at something again and again in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class Refresher:
    """Calls `look` at once and then every `seconds`. A look that fails is logged, and the next one comes."""

    def __init__(self, name: str, look: Callable[[], Awaitable[None]], seconds: float) -> None:
        self._name = name
        self._look = look
        self._seconds = seconds
        self._looked = asyncio.Event()
        self._task: asyncio.Task | None = None

    async def start(self, patience: float) -> None:
        """Returns after the first look, or after `patience` seconds.

        A gateway has several workers behind one port: each must know the models before it takes a request.
        """
        self._task = asyncio.create_task(self._run(), name=self._name)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._looked.wait(), patience)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                # stale knowledge is better than none; a bug must not end the watch
                log.exception("%s: reading from Triton failed", self._name)
            self._looked.set()
            await asyncio.sleep(self._seconds)
