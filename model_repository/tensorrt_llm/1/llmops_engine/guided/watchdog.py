"""Measurement of the work that grammars cause in each engine step, against a budget.

GenAI follows grammars inside `step()`, in the threads of its sampler, while the engine thread waits
for them. It does not report how long that took. Two clocks tell: the time for which the engine
thread slept, and the processor time of the sampler's threads. The lower one counts, so that neither
a busy machine nor OpenVINO's own threads look like a grammar.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

#: Consecutive guided steps over the budget after which a grammar is ended. A single one may be
#: chance.
STEPS_OVER_BUDGET = 3
#: Budgets that a single step takes only because of its grammars.
MAX_SINGLE_STEP_BUDGETS = 10
#: Share of the busiest thread's time from which on a thread is taken to compute the model.
_MODEL_SHARE = 0.05
#: Weight of the newest step without a grammar in the moving average of ordinary sampling.
_EMA_WEIGHT = 0.1
_SCHEDULE = "/proc/thread-self/schedstat"


class _Clocks(NamedTuple):
    """The readings of several clocks, in seconds.

    The clocks are the wall clock, this thread's work, its wait for a processor, and the sampler's
    work.
    """

    wall: float
    own: float
    queued: float
    sampler: float


class GrammarWatchdog:
    """A comparison of each step with its budget.

    Only `watch_threads` may be called off the engine thread.
    """

    def __init__(self, token_seconds: float) -> None:
        """Take the seconds that one grammar may use per token."""
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
        """Note the clocks before a step."""
        self._started = self._clocks()

    def stop(self, sequences: int, expected: float | None) -> float:
        """Return the seconds that a step's grammars took if they exceed their budget, else 0.

        Args:
            sequences: Sequences that were in the step.
            expected: Mean seconds of the step's grammars, or None for a step without a grammar.
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


def sampler_threads(known: Iterable[int], before: dict[int, float], after: dict[int, float]) -> list[int]:
    """Return the threads that started with a pipeline but do not compute the model.

    Args:
        known: Threads that existed before the pipeline.
        before: `thread_times` before a long prompt was read.
        after: `thread_times` afterwards.
    """
    used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items() if thread not in set(known)}
    busiest = max([*used.values(), time.get_clock_info("thread_time").resolution])
    return [thread for thread, seconds in used.items() if seconds < _MODEL_SHARE * busiest]


def _processor_time(thread: int) -> float | None:
    """Return the processor seconds of a thread of this process, or None if it has ended."""
    with contextlib.suppress(OSError):
        # the thread's clock id, computed as in pthread_getcpuclockid
        return time.clock_gettime((~thread << 3) | 6)
    return None


def _queued() -> float:
    """Return the seconds that this thread has waited for a processor.

    The result is 0 if the kernel does not count them.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(_SCHEDULE).read_bytes().split()[1]) / 1e9
    return 0.0
