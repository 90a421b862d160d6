"""Noticing that a client went away, for streaming and plain answers alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive

# Seconds before listening starts: creating a task is a good part of the cost of a short answer. A client that leaves is
# noticed that much later.
LISTEN_DELAY = 0.1


class DisconnectWatcher:
    """Listens on `receive` once the body is read; tells the current owner when the client disconnects."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._receive = receive
        self._on_gone: Callable[[], None] | None = None
        self._task: asyncio.Task | None = None
        self._timer = asyncio.get_running_loop().call_later(LISTEN_DELAY, self._begin)

    def tell(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when the client goes; at once when it already has."""
        self._on_gone = on_gone
        if self.gone:
            on_gone()

    def close(self) -> None:
        self._on_gone = None
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            # a cancelled task holds its frames, and they hold this object: a reference cycle
            self._task = None

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()
