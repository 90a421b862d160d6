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
from typing import TypeVar

from llmops.gateway.callers.places import Places
from llmops.gateway.callers.shares import Shares
from llmops.gateway.errors import UnavailableError

T = TypeVar("T")

# Under this many characters a prompt takes about half a millisecond, less than a thread's hand-over costs the others
INLINE_CHARACTERS = 4096
# seconds of CPU that work may take on the event loop, and on a thread for brief work
INLINE_SECONDS, BRIEF_SECONDS = 0.02, 0.25
# seconds
SWITCH_INTERVAL, COLLECTED_EVERY = 0.0005, 10.0


class TooLongError(Exception):
    """Work has outlasted its thread's `patience`, and stopped; only what leaves nothing behind may say so."""


class _Manner(threading.local):
    seconds = math.inf


_manner = _Manner()


def patience() -> float:
    """Seconds of CPU after which this thread should stop what it does, with TooLongError."""
    return _manner.seconds


class TextThreads:
    """`threads` for brief work, one more for long work. `backlog` requests may wait, of which no client has all."""

    def __init__(self, threads: int = 2, backlog: int = 1024) -> None:
        self._brief, self._long = _Lane("llmops-text", threads), _Lane("llmops-long", 1)
        self._places = Shares(threads + backlog)

    async def run(self, work: Callable[[], T], size: int, caller: str = "") -> T:
        """Do `work`, which handles about `size` characters, for `caller`, `a/b` for `b` of `a`. It may be begun twice.

        Raises UnavailableError when the queue is full, or the caller's share of it.
        """
        if size <= INLINE_CHARACTERS:
            try:
                return _within(INLINE_SECONDS, work)
            except TooLongError:
                return await self.run(work, INLINE_CHARACTERS + 1, caller)
        if not self._places.take(caller):
            raise UnavailableError("Too many long prompts are being prepared; try again.", code="overloaded")
        try:
            return await self._brief.run(lambda: _within(BRIEF_SECONDS, work), caller)
        except TooLongError:
            return await self._long.run(work, caller)
        finally:
            self._places.give_back(caller)

    def close(self) -> None:
        self._brief.close()
        self._long.close()


def _within(seconds: float, work: Callable[[], T]) -> T:
    _manner.seconds = seconds
    try:
        return work()
    finally:
        _manner.seconds = math.inf


class _Interpreter:
    """How Python behaves while a text thread works. On the event loop's thread only.

    The loop asks for the GIL after each system call and would wait Python's 5 ms at each: the switch interval is
    shorter. Where only the loop and gRPC's threads take turns, sooner costs more
    (docs/decisions/0307-switch-interval.md). The garbage collector, which holds the GIL while it looks at the millions
    of objects of a large grammar and finds no cycle, waits; under endless work it has its turn now and then.
    """

    def __init__(self) -> None:
        self._working = 0
        self._usual = sys.getswitchinterval()
        self._collected = 0.0

    def begin(self) -> None:
        self._working += 1
        if self._working == 1:
            sys.setswitchinterval(SWITCH_INTERVAL)
            gc.disable()
            self._collected = time.monotonic()

    def end(self) -> None:
        self._working -= 1
        if not self._working:
            sys.setswitchinterval(self._usual)
            gc.enable()
        elif time.monotonic() - self._collected > COLLECTED_EVERY:
            gc.collect(1)
            self._collected = time.monotonic()


_interpreter = _Interpreter()


class _Lane:
    """Threads; when none is idle, those who ask take turns. On the event loop's thread only."""

    def __init__(self, name: str, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._idle = Places(threads)

    async def run(self, work: Callable[[], T], caller: str) -> T:
        await self._idle.enter(caller.split("/", 1))
        # a client that leaves does not end its thread: the next turn is when that is over
        _interpreter.begin()
        done = asyncio.get_running_loop().run_in_executor(self._pool, work)
        done.add_done_callback(lambda _: self._over())
        return await asyncio.shield(done)

    def _over(self) -> None:
        _interpreter.end()
        self._idle.leave()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
