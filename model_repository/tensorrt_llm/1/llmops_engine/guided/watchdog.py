"""Measurement of the work that grammars cause in each engine step, against a budget.

GenAI follows grammars inside `step()`, in the threads of its sampler, while the engine thread waits
for them. GenAI does not report how long the grammars took. Two clocks bound the time: the time for
which the engine thread slept, and the processor time of the sampler's threads. The lower of the two
counts, so that neither a busy machine nor OpenVINO's own threads look like a slow grammar.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

#: Number of consecutive guided steps over the budget after which a grammar is ended. A single step
#: over the budget may be chance.
STEPS_OVER_BUDGET = 3
#: Multiple of the budget from which on a single step ends a grammar: chance does not delay a step
#: that much.
MAX_SINGLE_STEP_BUDGETS = 10
#: Share of the busiest thread's time from which on a thread counts as computing the model. The
#: sampler's threads stay far below it.
_MODEL_SHARE = 0.05
#: Weight of the newest step in the moving average of the sampling time per sequence without
#: grammars. With this weight, a single slow step changes the average little.
_EMA_WEIGHT = 0.1
_SCHEDULE = "/proc/thread-self/schedstat"


class _Clocks(NamedTuple):
    """The readings of several clocks, in seconds.

    `wall` is the wall clock, `own` the engine thread's processor time, `queued` the time for which
    the engine thread waited for a processor, and `sampler` the processor time of the sampler's
    threads.
    """

    wall: float
    own: float
    queued: float
    sampler: float


class GrammarWatchdog:
    """A watchdog that compares the time of grammars in each step with a budget.

    Only `watch_threads` may be called from other threads than the engine thread.
    """

    def __init__(self, token_seconds: float) -> None:
        """Create a watchdog. `token_seconds` is the budget of a grammar per token."""
        self._budget = token_seconds
        self._threads: list[int] = []
        self._plain = 0.0
        self._over = 0
        self._started = _Clocks(0.0, 0.0, 0.0, 0.0)

    def watch_threads(self, threads: Iterable[int]) -> None:
        """Also watch `threads`, given by their native ids. Threads that have ended are forgotten."""
        kept = [thread for thread in self._threads if _processor_time(thread) is not None]
        self._threads = [*kept, *threads]

    def start(self) -> None:
        """Read the clocks before a step."""
        self._started = self._clocks()

    def stop(self, sequences: int, expected: float | None) -> float:
        """Return the seconds that a step's grammars took if they exceed their budget, else 0.

        Args:
            sequences: The number of sequences in the step.
            expected: The sum of the mean seconds of the step's grammars, or None for a step without
                a grammar.
        """
        before, now = self._started, self._clocks()
        slept = now.wall - before.wall - (now.own - before.own) - (now.queued - before.queued)
        work = max(0.0, min(slept, now.sampler - before.sampler))
        if expected is None:
            self._plain += _EMA_WEIGHT * (work / max(sequences, 1) - self._plain)
            self._over = 0
            return 0.0
        excess = work - self._plain * sequences - expected
        self._over = self._over + 1 if excess > self._budget else 0
        return work if self._over >= STEPS_OVER_BUDGET or excess > MAX_SINGLE_STEP_BUDGETS * self._budget else 0.0

    def _clocks(self) -> _Clocks:
        sampler = sum(_processor_time(thread) or 0.0 for thread in self._threads)
        return _Clocks(time.perf_counter(), time.thread_time(), _queued(), sampler)


def thread_times() -> dict[int, float]:
    """Return the processor time of threads that Python did not start, by native id.

    Only threads of this process are included.
    """
    ours = {thread.native_id for thread in threading.enumerate()}
    found = {}
    for name in os.listdir("/proc/self/task"):
        seconds = _processor_time(int(name))
        if int(name) not in ours and seconds is not None:
            found[int(name)] = seconds
    return found


def sampler_threads(known: Iterable[int], before: dict[int, float], after: dict[int, float], own: float) -> list[int]:
    """Return the threads that started with a pipeline but do not compute the model.

    The threads that compute the model may be older than the pipeline: OpenVINO keeps them for the
    next model, and the calling thread is one of them.

    Args:
        known: Native ids of the threads that existed before the pipeline.
        before: The result of `thread_times` before a long prompt was read.
        after: The result of `thread_times` after the prompt was read.
        own: The processor seconds of the calling thread while the prompt was read.
    """
    used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    busiest = max([*used.values(), own])
    return [thread for thread in used.keys() - set(known) if used[thread] < _MODEL_SHARE * busiest]


def _processor_time(thread: int) -> float | None:
    """Return the processor seconds of a thread of this process, or None if it has ended."""
    with contextlib.suppress(OSError):
        # the thread's clock id, computed as in pthread_getcpuclockid
        return time.clock_gettime((~thread << 3) | 6)
    return None


def _queued() -> float:
    """Return the seconds that this thread has waited for a processor.

    The result is 0 if the kernel does not count this time.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(_SCHEDULE).read_bytes().split()[1]) / 1e9
    return 0.0
