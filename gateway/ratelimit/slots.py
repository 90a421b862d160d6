"""A semaphore whose waiting clients take turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from llmops.round_robin import RoundRobinQueue


class _Waiter(NamedTuple):
    places: int
    come: asyncio.Future[None]


class FairSlots:
    """A semaphore that serves its waiting clients in turn. Use it on the event loop's thread only.

    `FairShares`, not this class, bounds the number of waiting requests.
    """

    def __init__(self, places: int) -> None:
        self._all = self._free = places
        self._waiting: RoundRobinQueue[_Waiter] = RoundRobinQueue()
        # The first waiter, taken from the queue until enough slots for it are free.
        self._next: _Waiter | None = None

    async def enter(self, share: str, count: int = 1, *queues: str) -> None:
        """Wait for `count` slots, which must not be more than exist.

        Args:
            share: The client, in the form of `Caller.share`: an address, or `address/key`. The keys
                of an address share the address's turns.
            count: The number of slots.
            queues: The names of a queue within the client's turns, such as one per request.
        """
        if self._next is None and not self._waiting.size and count <= self._free:
            self._free -= count
            return
        turn = _Waiter(count, asyncio.get_running_loop().create_future())
        self._waiting.put([*share.split("/", 1), *queues], turn)
        try:
            await turn.come
        except asyncio.CancelledError:
            if turn.come.done() and not turn.come.cancelled():
                self.leave(count)
            raise

    @asynccontextmanager
    async def slot(self, share: str, count: int = 1, *queues: str) -> AsyncIterator[None]:
        """Hold `count` slots inside the context, after waiting for them as in `enter`."""
        await self.enter(share, count, *queues)
        try:
            yield
        finally:
            self.leave(count)

    def resize(self, places: int) -> None:
        """Change the number of slots to `places`.

        If the number falls, surplus slots disappear as they are given back.
        """
        more, self._all = places - self._all, places
        self.leave(more)

    def leave(self, count: int = 1) -> None:
        """Give `count` slots back, and pass free slots to the next waiters at once."""
        self._free += count
        while self._next is not None or self._waiting.size:
            turn = self._next or self._waiting.take()
            self._next = None
            if turn.come.done():  # The request left while it waited.
                continue
            if turn.places > self._free:
                self._next = turn
                return
            self._free -= turn.places
            turn.come.set_result(None)
