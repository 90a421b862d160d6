"""Rendering, tokenising and the making of grammars off the event loop: threads for which clients take turns.

All work begins in the lane of what is brief. What turns out not to be is done in a lane of its own, from its beginning:
there it holds up nothing but its like.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from llmops.gateway.errors import UnavailableError

T = TypeVar("T")

# Under this many characters a prompt takes about half a millisecond, less than a thread's hand-over costs the others
INLINE_CHARACTERS = 4096


class TooLongError(Exception):
    """Work that should be brief (`is_brief`) is not, and stopped; only what leaves nothing behind may say so."""


class _Manner(threading.local):
    brief = False


_manner = _Manner()


def is_brief() -> bool:
    """Whether this thread should stop what takes more than a moment, with TooLongError."""
    return _manner.brief


class Workers:
    """`threads` run at once what is brief, one more what is not; `backlog` more may wait, then requests are refused."""

    def __init__(self, threads: int = 2, backlog: int = 256) -> None:
        self._brief, self._long = _Lane("llmops-text", threads), _Lane("llmops-long", 1)
        self._free = threads + backlog

    async def run(self, work: Callable[[], T], size: int, caller: str = "") -> T:
        """Do `work`, which handles about `size` characters, for `caller`. It may be begun twice.

        Raises UnavailableError when the queue is full.
        """
        if size <= INLINE_CHARACTERS:
            return work()
        if self._free <= 0:
            raise UnavailableError("Too many long prompts are being prepared; try again.", code="overloaded")
        self._free -= 1
        try:
            return await self._brief.run(lambda: _briefly(work), caller)
        except TooLongError:
            return await self._long.run(work, caller)
        finally:
            self._free += 1

    def close(self) -> None:
        self._brief.close()
        self._long.close()


def _briefly(work: Callable[[], T]) -> T:
    _manner.brief = True
    try:
        return work()
    finally:
        _manner.brief = False


class _Lane:
    """Threads; when none is idle, those who ask take turns. On the event loop's thread only."""

    def __init__(self, name: str, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._idle = threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, work: Callable[[], T], caller: str) -> T:
        if self._idle:
            self._idle -= 1
        else:
            await self._turn(caller)
        # a client that leaves does not end its thread: the next turn is when that is over
        done = asyncio.get_running_loop().run_in_executor(self._pool, work)
        done.add_done_callback(lambda _: self._next())
        return await asyncio.shield(done)

    async def _turn(self, caller: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def _next(self) -> None:
        while self._waiting:
            caller, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._idle += 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
