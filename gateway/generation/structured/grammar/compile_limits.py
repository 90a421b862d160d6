"""The errors of schemas without a grammar, and the budget of work for compiling a grammar.

Work is counted in steps, so that a schema is refused on every machine or on none. Code whose work
can grow faster than the client's input calls `spend_steps`, so that a thread that compiles a
grammar ends by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

from llmops.clocks import CpuBudget

#: Maximum steps for one grammar, about 3 s of CPU time, for which a client may hold a text thread.
MAX_STEPS = 2_000_000
#: Maximum CPU seconds for one grammar, which bounds work that steps do not measure well.
MAX_SECONDS = 5.0

#: Steps between two checks of the CPU time, so that most steps cost only an addition.
_CLOCK_INTERVAL = 1 << 12

#: Maximum CPU seconds counted for one interval between two checks: some hundred times the usual
#: time of its steps, so that a pause of the virtual machine does not use up the budget.
_MAX_CLOCK_STEP = 0.5


class NotEnforceableError(Exception):
    """An error for a part of a request that no grammar can enforce. The message names the part."""


class UnsatisfiableSchemaError(NotEnforceableError):
    """An error for a schema that no value satisfies."""


class GrammarTooComplexError(Exception):
    """An error for a grammar that takes more work to compile than the budget allows.

    Unlike an unsupported keyword, the part of the schema must not be ignored silently, because the
    part at which the budget ends depends on the order of work.
    """


class _StepCounter(threading.local):
    """The budget of the current thread. Nothing is counted outside of `step_budget`."""

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
        GrammarTooComplexError: Raised by the call of `spend_steps` that exceeds a limit.
    """
    previous = _counter.left, _counter.next_clock_check, _counter.time
    _counter.left, _counter.next_clock_check = steps, steps - _CLOCK_INTERVAL
    _counter.time = CpuBudget(seconds, _MAX_CLOCK_STEP, thread_time)
    try:
        yield lambda: steps - _counter.left
    finally:
        _counter.left, _counter.next_clock_check, _counter.time = previous


def spend_steps(steps: int = 1) -> None:
    """Count `steps` that are about to be taken, each of about one or two microseconds.

    Raises:
        GrammarTooComplexError: The budget is used up.
    """
    left = _counter.left = _counter.left - steps
    if left < _counter.next_clock_check:
        _check_budget()


def _check_budget() -> None:
    _counter.next_clock_check = _counter.left - _CLOCK_INTERVAL
    if _counter.time.is_over() or _counter.left < 0:
        raise GrammarTooComplexError("it is too complex: compiling a grammar for it takes too much work; simplify it")
