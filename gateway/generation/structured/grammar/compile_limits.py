"""The reasons why a schema has no grammar, and the budget of work for compiling one.

Work is counted in steps, so that a schema is refused on every machine or on none. Code whose work
can grow faster than what a client sent calls `spend_steps`, so that a thread which compiles a
grammar ends by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

from llmops.clocks import CpuBudget

#: Steps of one grammar, about 3 s of CPU, and CPU seconds for work that is not counted well.
MAX_STEPS = 2_000_000
MAX_SECONDS = 5.0

#: Steps between two checks of the clock.
_CLOCK_INTERVAL = 1 << 12

#: CPU seconds that one interval between two checks may count: some hundred times what its steps
#: take.
_MAX_CLOCK_STEP = 0.5


class NotEnforceableError(Exception):
    """An error for a part of a request that no grammar can enforce. The message names the part."""


class UnsatisfiableSchemaError(NotEnforceableError):
    """An error for a schema that no value satisfies."""


class GrammarTooComplexError(Exception):
    """An error for a grammar that takes more work to compile than the budget allows.

    Unlike an unsupported keyword, this must not be left out silently: where the budget ends depends
    on the order of work.
    """


class _StepCounter(threading.local):
    """The budget of the current thread. Outside of `step_budget` nothing is counted."""

    left = float("inf")
    next_clock_check = float("inf")
    time = CpuBudget(float("inf"), _MAX_CLOCK_STEP, thread_time)


_counter = _StepCounter()


@contextmanager
def step_budget(steps: float, seconds: float = MAX_SECONDS) -> Iterator[Callable[[], float]]:
    """Limit the work of the body to `steps` and to `seconds` of CPU.

    Yields:
        A function that returns the steps spent so far.

    Raises:
        GrammarTooComplexError: From the `spend_steps` that exceeds a limit.
    """
    previous = _counter.left, _counter.next_clock_check, _counter.time
    _counter.left, _counter.next_clock_check = steps, steps - _CLOCK_INTERVAL
    _counter.time = CpuBudget(seconds, _MAX_CLOCK_STEP, thread_time)
    try:
        yield lambda: steps - _counter.left
    finally:
        _counter.left, _counter.next_clock_check, _counter.time = previous


def spend_steps(steps: int = 1) -> None:
    """Count `steps`, each of a microsecond or two, which are about to be taken."""
    left = _counter.left = _counter.left - steps
    if left < _counter.next_clock_check:
        _check_budget()


def _check_budget() -> None:
    _counter.next_clock_check = _counter.left - _CLOCK_INTERVAL
    if _counter.time.is_over() or _counter.left < 0:
        raise GrammarTooComplexError("it is too complex: compiling a grammar from it takes too much work")
