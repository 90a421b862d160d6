"""Threads for rendering, tokenizing and compiling grammars, in which clients take turns.

Work for short texts runs on the event loop, and work for longer texts in the short lane. Work that
exceeds its CPU limit starts again: from the event loop in the short lane, and from the short lane
in the long lane, where it delays only other long work. Large texts have their own lane and are
processed one after the other, because each token takes 500 bytes of memory while its text is
tokenized. Slow tokenizers have their own lane, too, because they cannot be interrupted.
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

#: Maximum length of a text that is processed on the event loop, in characters. Such a text takes
#: half a millisecond, which delays other clients less than a handover to a thread.
INLINE_CHARACTERS = 4096

#: Minimum length of a large text, in characters. Large texts are tokenized one after the other,
#: because each takes much memory.
LARGE_CHARACTERS = 2**18

#: Size, in characters, that keeps work off the event loop whatever the length of its text.
THREAD_CHARACTERS = INLINE_CHARACTERS + 1

#: Maximum CPU seconds of work on the event loop. Work that takes longer starts again in the short
#: lane.
INLINE_SECONDS = 0.02
#: Maximum CPU seconds of work in the short lane. Work that takes longer starts again in the long
#: lane.
SHORT_LANE_SECONDS = 0.25

#: Seconds between two requests to release the GIL while a text thread works. Python's default of 5
#: ms would delay the event loop.
SWITCH_INTERVAL = 0.0005

#: Minimum number of seconds between two garbage collections while text threads work without a
#: break. Bounds the memory of cycles that were not collected.
GC_INTERVAL = 10.0


class CpuLimitError(Exception):
    """An error for work that exceeded `thread_limit` and must start again in another lane.

    Raised only by work without side effects.
    """


class SlowTokenizerError(CpuLimitError):
    """An error for work that must start again in the lane of slow tokenizers, before it tokenizes."""


class _ThreadLimit(threading.local):
    cpu_seconds = math.inf


#: The CPU seconds that the current work may take on this thread. Work that takes longer must raise
#: CpuLimitError.
thread_limit = _ThreadLimit()


class TextThreadPool:
    """A pool of threads in four lanes: for short and long work, large texts and slow tokenizers.

    The short lane has `threads` threads, and the other lanes have one each. At most `backlog`
    requests wait, and no client can use the whole backlog.
    """

    def __init__(self, threads: int = 2, backlog: int = 1024) -> None:
        self._short_lane = ThreadLane("llmops-text", threads)
        self._long_lane = ThreadLane("llmops-long", 1, is_long=True)
        self._large_lane = ThreadLane("llmops-large", 1)
        self._slow_lane = ThreadLane("llmops-slow", 1)
        self._shares = FairShares(threads + backlog)

    async def run(self, work: Callable[[], T], size: int, caller: str = "") -> T:
        """Return the result of `work`, which may be started more than once.

        Args:
            work: The work, without side effects. It raises CpuLimitError to be started again with a
                higher limit.
            size: The approximate number of characters to process.
            caller: The client's path of fair shares, such as `tenant/user`.

        Raises:
            OverloadedError: The backlog, or the caller's share of the backlog, is full.
        """
        if size <= INLINE_CHARACTERS:
            with suppress(CpuLimitError):
                return _run_with_cpu_limit(INLINE_SECONDS, work)
            return await self.run(work, THREAD_CHARACTERS, caller)
        if not self._shares.take(caller):
            raise OverloadedError("Too many long prompts are being prepared; send the request again later.")
        try:
            lane = self._large_lane if size > LARGE_CHARACTERS else self._short_lane
            try:
                return await lane.run(lambda: _run_with_cpu_limit(SHORT_LANE_SECONDS, work), caller)
            except CpuLimitError as error:
                lane = self._slow_lane if isinstance(error, SlowTokenizerError) else self._long_lane
            return await lane.run(work, caller)
        finally:
            self._shares.give_back(caller)

    def close(self) -> None:
        """Cancel waiting work. Work in progress is not interrupted."""
        self._short_lane.close()
        self._long_lane.close()
        self._large_lane.close()
        self._slow_lane.close()


def _run_with_cpu_limit(seconds: float, work: Callable[[], T]) -> T:
    thread_limit.cpu_seconds = seconds
    try:
        return work()
    finally:
        thread_limit.cpu_seconds = math.inf


class _InterpreterTuning:
    """Settings of the Python interpreter while text threads work.

    Used on the event loop's thread only.

    The event loop requests the GIL after each system call and would wait Python's default of 5 ms
    each time, so the switch interval is shorter while text threads work. Without text threads, a
    short interval costs more (docs/decisions/0008-untrusted-text.md).

    The garbage collector holds the GIL while it examines the millions of objects of a large
    grammar, without finding a cycle. The collector is therefore off while text threads work. If
    text threads work without a break, a collection runs about every GC_INTERVAL, while no work is
    in the long lane.
    """

    def __init__(self) -> None:
        self._running = self._running_long = 0
        self._default_interval = sys.getswitchinterval()
        self._collected_at = 0.0

    def begin(self, is_long: bool) -> None:
        """Record that a thread starts to work.

        Args:
            is_long: True if the work is in the long lane.
        """
        self._running += 1
        self._running_long += is_long
        if self._running == 1:
            sys.setswitchinterval(SWITCH_INTERVAL)
            gc.disable()
            self._collected_at = time.monotonic()

    def end(self, is_long: bool) -> None:
        """Record that a thread has ended its work.

        Args:
            is_long: True if the work is in the long lane.
        """
        self._running -= 1
        self._running_long -= is_long
        if not self._running:
            sys.setswitchinterval(self._default_interval)
            gc.enable()
        elif not self._running_long and time.monotonic() - self._collected_at > GC_INTERVAL:
            gc.collect(1)
            self._collected_at = time.monotonic()


_interpreter_tuning = _InterpreterTuning()


class ThreadLane:
    """A pool of threads that serves waiting clients in round robin.

    The lane must be used on the event loop's thread only.
    """

    def __init__(self, name: str, threads: int, is_long: bool = False) -> None:
        self._is_long = is_long
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._slots = FairSlots(threads)

    async def run(self, work: Callable[[], T], caller: str) -> T:
        """Start `work` when it is the caller's turn, and return the result."""
        await self._slots.enter(caller)
        _interpreter_tuning.begin(self._is_long)
        done = asyncio.get_running_loop().run_in_executor(self._pool, work)
        # A client that disconnects does not stop its thread, so the slot becomes free when the work
        # ends.
        done.add_done_callback(lambda _: self._release())
        try:
            return await asyncio.shield(done)
        finally:
            # An error refers to this frame, and through `done` the frame would refer to the error.
            # The cycle would keep all objects of `work` in memory.
            del done

    def _release(self) -> None:
        _interpreter_tuning.end(self._is_long)
        self._slots.leave()

    def close(self) -> None:
        """Cancel waiting work."""
        self._pool.shutdown(wait=False, cancel_futures=True)
