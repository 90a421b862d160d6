"""Rendering and tokenising off the event loop: a bounded pool of threads with a bounded queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from llmops.gateway.errors import UnavailableError

T = TypeVar("T")

# Under this many characters a prompt takes about half a millisecond, less than a thread's hand-over costs the others
INLINE_CHARACTERS = 4096


class Workers:
    """`threads` run at once; `backlog` more may wait, then requests are turned away."""

    def __init__(self, threads: int = 2, backlog: int = 256) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="llmops-text")
        self._free = threads + backlog

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Do `work`, which handles about `size` characters. Raises UnavailableError when the queue is full."""
        if size <= INLINE_CHARACTERS:
            return work()
        if self._free <= 0:
            raise UnavailableError("Too many long prompts are being prepared; try again.", code="overloaded")
        self._free -= 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._free += 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
