"""Places that are waited for: while none is free, those who ask take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from llmops.round_robin import RoundRobinQueue


class _Waiter(NamedTuple):
    places: int
    come: asyncio.Future[None]


class FairSlots:
    """On the event loop's thread only. How many may wait is not bounded here (see Shares)."""

    def __init__(self, places: int) -> None:
        self._all = self._free = places
        self._waiting: RoundRobinQueue[_Waiter] = RoundRobinQueue()
        # whose turn it is, as soon as there is room
        self._next: _Waiter | None = None

    async def enter(self, path: Sequence[str], count: int = 1) -> None:
        """Wait for `count` places, which must not be more than there are.

        `path` says who asks, as for Turns.
        """
        if self._next is None and not self._waiting.size and count <= self._free:
            self._free -= count
            return
        turn = _Waiter(count, asyncio.get_running_loop().create_future())
        self._waiting.put(path, turn)
        try:
            await turn.come
        except asyncio.CancelledError:
            if turn.come.done() and not turn.come.cancelled():
                self.leave(count)
            raise

    def resize(self, places: int) -> None:
        """From now on there are so many, once those that are too many have been left."""
        more, self._all = places - self._all, places
        self.leave(more)

    def leave(self, count: int = 1) -> None:
        """Give places back; they are at once those of whose turn it is."""
        self._free += count
        while self._next is not None or self._waiting.size:
            turn = self._next or self._waiting.take()
            self._next = None
            if turn.come.done():  # it left while it waited
                continue
            if turn.places > self._free:
                self._next = turn
                return
            self._free -= turn.places
            turn.come.set_result(None)
