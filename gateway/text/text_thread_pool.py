"""Threads for rendering, tokenizing and compiling grammars, which clients use in turns.

Short texts are handled at once on the event loop, longer ones in the short lane. Work that exceeds
the CPU limit of its place starts again: from the event loop in the short lane, from the short lane
in the long lane, where it delays only work of its kind. Large texts have a lane of their own, one
after the other, because each token of a text takes 500 bytes while it is tokenized.
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

from llmops.gateway.errors import OverloadedError
from llmops.gateway.ratelimit.fairness import FairShares
from llmops.gateway.ratelimit.slots import FairSlots

T = TypeVar("T")

#: Characters of a prompt that is handled on the event loop: they take about half a millisecond,
#: less than the handover to a thread costs the other clients.
INLINE_CHARACTERS = 4096

#: Characters of a text that is large.
LARGE_CHARACTERS = 2**18

#: The cost, in characters, of work that never runs on the event loop.
THREAD_CHARACTERS = INLINE_CHARACTERS + 1

#: CPU seconds that work may take on the event loop, and in the short lane.
INLINE_SECONDS = 0.02
SHORT_LANE_SECONDS = 0.25

#: Seconds after which Python hands the GIL over while a text thread works.
SWITCH_INTERVAL = 0.0005

#: Seconds between two garbage collections while text threads work without a break.
GC_INTERVAL = 10.0


class CpuLimitError(Exception):
    """An error for work that exceeded `thread_limit` and must start again elsewhere.

    Raise it only from work without side effects.
    """


class _ThreadLimit(threading.local):
    cpu_seconds = math.inf


#: The CPU seconds that the current work may take on this thread. Work that takes longer must raise
#: CpuLimitError.
thread_limit = _ThreadLimit()


class TextThreadPool:
    """Threads in three lanes: `threads` for short work, one for long work, one for large texts.

    At most `backlog` requests wait for them, and no client can use the whole backlog.
    """

    def __init__(self, threads: int = 2, backlog: int = 1024) -> None:
        self._short_lane = _ThreadLane("llmops-text", threads)
        self._long_lane = _ThreadLane("llmops-long", 1, is_long=True)
        self._large_lane = _ThreadLane("llmops-large", 1)
        self._shares = FairShares(threads + backlog)

    async def run(self, work: Callable[[], T], size: int, caller: str = "") -> T:
        """Return the result of `work`, which may be started more than once.

        Args:
            work: The work. It raises CpuLimitError to be started again with a higher limit.
            size: The characters that it handles, about.
            caller: The client, as `tenant/user` or any two parts that share fairly.

        Raises:
            OverloadedError: The queue is full, or the caller's share of it.
        """
        if size <= INLINE_CHARACTERS:
            with suppress(CpuLimitError):
                return _run_with_cpu_limit(INLINE_SECONDS, work)
            return await self.run(work, THREAD_CHARACTERS, caller)
        if not self._shares.take(caller):
            raise OverloadedError("Too many long prompts are being prepared; try again.")
        try:
            lane = self._large_lane if size > LARGE_CHARACTERS else self._short_lane
            with suppress(CpuLimitError):
                return await lane.run(lambda: _run_with_cpu_limit(SHORT_LANE_SECONDS, work), caller)
            return await self._long_lane.run(work, caller)
        finally:
            self._shares.give_back(caller)

    def close(self) -> None:
        """Cancel the work that waits. Work in progress ends by itself."""
        self._short_lane.close()
        self._long_lane.close()
        self._large_lane.close()


def _run_with_cpu_limit(seconds: float, work: Callable[[], T]) -> T:
    thread_limit.cpu_seconds = seconds
    try:
        return work()
    finally:
        thread_limit.cpu_seconds = math.inf


class _InterpreterTuning:
    """Settings of the Python interpreter while text threads work.

    Used on the event loop's thread only.

    The loop asks for the GIL after each system call and would wait Python's 5 ms each time, so the
    switch interval is shorter. Without text threads, a shorter one costs more
    (docs/decisions/0008-untrusted-text.md). The garbage collector holds the GIL while it looks at
    the millions of objects of a large grammar and finds no cycle, so it waits; under endless work
    it runs every GC_INTERVAL, between two large grammars.
    """

    def __init__(self) -> None:
        self._running = self._running_long = 0
        self._default_interval = sys.getswitchinterval()
        self._collected_at = 0.0

    def begin(self, is_long: bool) -> None:
        """Note that a thread starts to work."""
        self._running += 1
        self._running_long += is_long
        if self._running == 1:
            sys.setswitchinterval(SWITCH_INTERVAL)
            gc.disable()
            self._collected_at = time.monotonic()

    def end(self, is_long: bool) -> None:
        """Note that a thread has ended its work."""
        self._running -= 1
        self._running_long -= is_long
        if not self._running:
            sys.setswitchinterval(self._default_interval)
            gc.enable()
        elif not self._running_long and time.monotonic() - self._collected_at > GC_INTERVAL:
            gc.collect(1)
            self._collected_at = time.monotonic()


_interpreter_tuning = _InterpreterTuning()


class _ThreadLane:
    """A pool of threads that serves waiting clients in round robin.

    The lane must be used on the event loop's thread only.
    """

    def __init__(self, name: str, threads: int, is_long: bool = False) -> None:
        self._is_long = is_long
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._slots = FairSlots(threads)

    async def run(self, work: Callable[[], T], caller: str) -> T:
        """Return the result of `work`, started when it is the caller's turn."""
        await self._slots.enter(caller)
        _interpreter_tuning.begin(self._is_long)
        done = asyncio.get_running_loop().run_in_executor(self._pool, work)
        # a client that disconnects does not end its thread: the slot is free when the thread is
        done.add_done_callback(lambda _: self._release())
        try:
            return await asyncio.shield(done)
        finally:
            # an error refers to this frame, and the frame to the error: a cycle that would keep all
            # that `work` made
            del done

    def _release(self) -> None:
        _interpreter_tuning.end(self._is_long)
        self._slots.leave()

    def close(self) -> None:
        """Cancel the work that waits."""
        self._pool.shutdown(wait=False, cancel_futures=True)
