"""Rendering, tokenising and the making of grammars off the event loop: threads that clients take turns on.

Short texts are worked on at once, by the event loop, others in the lane for brief work. What takes too long there is
started again: from the event loop in that lane, from that lane in one of its own, where it holds up only its like.
"""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from llmops.gateway.errors import UnavailableError
from llmops.gateway.ratelimit.fairness import FairShares
from llmops.gateway.ratelimit.slots import FairSlots

T = TypeVar("T")

# Under this many characters a prompt takes about half a millisecond, less than a thread's hand-over costs the others
INLINE_CHARACTERS = 4096
# seconds of CPU that work may take on the event loop, and on a thread for brief work
INLINE_SECONDS, SHORT_LANE_SECONDS = 0.02, 0.25
# seconds
SWITCH_INTERVAL, GC_INTERVAL = 0.0005, 10.0


class CpuLimitError(Exception):
    """Work has outlasted its thread's `thread_cpu_limit`, and stopped; only what leaves nothing behind may say so."""


class _ThreadLimit(threading.local):
    seconds = math.inf


_thread_limit = _ThreadLimit()


def thread_cpu_limit() -> float:
    """Seconds of CPU after which this thread should stop what it does, with CpuLimitError."""
    return _thread_limit.seconds


class TextThreadPool:
    """`threads` for brief work, one more for long work. `backlog` requests may wait, of which no client has all."""

    def __init__(self, threads: int = 2, backlog: int = 1024) -> None:
        self._brief, self._long = _ThreadLane("llmops-text", threads), _ThreadLane("llmops-long", 1, is_long=True)
        self._places = FairShares(threads + backlog)

    async def run(self, work: Callable[[], T], size: int, caller: str = "") -> T:
        """Do `work`, which handles about `size` characters, for `caller`, `a/b` for `b` of `a`. It may be begun twice.

        Raises UnavailableError when the queue is full, or the caller's share of it.
        """
        if size <= INLINE_CHARACTERS:
            with suppress(CpuLimitError):
                return _run_with_cpu_limit(INLINE_SECONDS, work)
            return await self.run(work, INLINE_CHARACTERS + 1, caller)
        if not self._places.take(caller):
            raise UnavailableError("Too many long prompts are being prepared; try again.", code="overloaded")
        try:
            with suppress(CpuLimitError):
                return await self._brief.run(lambda: _run_with_cpu_limit(SHORT_LANE_SECONDS, work), caller)
            return await self._long.run(work, caller)
        finally:
            self._places.give_back(caller)

    def close(self) -> None:
        self._brief.close()
        self._long.close()


def _run_with_cpu_limit(seconds: float, work: Callable[[], T]) -> T:
    _thread_limit.seconds = seconds
    try:
        return work()
    finally:
        _thread_limit.seconds = math.inf


class _InterpreterTuning:
    """How Python behaves while a text thread works. On the event loop's thread only.

    The loop asks for the GIL after each system call and would wait Python's 5 ms at each: the switch interval is
    shorter. Where only the loop and gRPC's threads take turns, sooner costs more
    (docs/decisions/0008-untrusted-text.md). The garbage collector, which holds the GIL while it looks at the millions
    of objects of a large grammar and finds no cycle, waits; under endless work it has its turn now and then, between
    two grammars that are large.
    """

    def __init__(self) -> None:
        self._working = self._long = 0
        self._usual = sys.getswitchinterval()
        self._collected = 0.0

    def begin(self, is_long: bool) -> None:
        self._working += 1
        self._long += is_long
        if self._working == 1:
            sys.setswitchinterval(SWITCH_INTERVAL)
            gc.disable()
            self._collected = time.monotonic()

    def end(self, is_long: bool) -> None:
        self._working -= 1
        self._long -= is_long
        if not self._working:
            sys.setswitchinterval(self._usual)
            gc.enable()
        elif not self._long and time.monotonic() - self._collected > GC_INTERVAL:
            gc.collect(1)
            self._collected = time.monotonic()


_interpreter_tuning = _InterpreterTuning()


class _ThreadLane:
    """Threads; when none is idle, those who ask take turns. On the event loop's thread only."""

    def __init__(self, name: str, threads: int, is_long: bool = False) -> None:
        self._is_long = is_long
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._idle = FairSlots(threads)

    async def run(self, work: Callable[[], T], caller: str) -> T:
        await self._idle.enter(caller.split("/", 1))
        # a client that leaves does not end its thread: the next turn is when that is over
        _interpreter_tuning.begin(self._is_long)
        done = asyncio.get_running_loop().run_in_executor(self._pool, work)
        done.add_done_callback(lambda _: self._over())
        try:
            return await asyncio.shield(done)
        finally:
            # an error has this frame, which has the error: a cycle, and in it all that the work had made
            del done

    def _over(self) -> None:
        _interpreter_tuning.end(self._is_long)
        self._idle.leave()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
