"""Noticing that a client went away, for streaming and plain answers alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class ClientWatch:
    """Listens on `receive` once the body is read; tells the current owner when the client disconnects."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._on_gone: Callable[[], None] | None = None
        self._task = asyncio.create_task(self._listen(receive))

    def tell(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when the client goes; at once when it already has."""
        self._on_gone = on_gone
        if self.gone:
            on_gone()

    def close(self) -> None:
        self._on_gone = None
        self._task.cancel()

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()
