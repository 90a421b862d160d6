"""How much work one grammar may take: counted, so that a schema is refused on every machine or on none.

Whatever may grow faster than what a client sent calls `spend_steps`, so a thread that makes a grammar ends by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

from llmops.clocks import CpuBudget
from llmops.gateway.generation.structured.grammar.errors import GrammarTooComplexError

# what one grammar may take: in steps about 3 s of CPU; the clock is for what is not counted well
MAX_STEPS, MAX_SECONDS = 2_000_000, 5.0
_CLOCK_INTERVAL = 1 << 12
# what the time between two looks counts at most (s): some hundred times what the steps take
_MAX_CLOCK_STEP = 0.5


class _StepCounter(threading.local):
    """Of this thread. Outside of `step_budget` nothing is counted."""

    left = float("inf")
    clock = float("inf")
    time = CpuBudget(float("inf"), _MAX_CLOCK_STEP, thread_time)


_counter = _StepCounter()


@contextmanager
def step_budget(steps: float, seconds: float = MAX_SECONDS) -> Iterator[Callable[[], float]]:
    """Raises GrammarTooComplexError from the `spend_steps` that goes over `steps` or `seconds` of CPU. Gives what says how much was
    spent."""
    before = _counter.left, _counter.clock, _counter.time
    _counter.left, _counter.clock, _counter.time = (
        steps,
        steps - _CLOCK_INTERVAL,
        CpuBudget(seconds, _MAX_CLOCK_STEP, thread_time),
    )
    try:
        yield lambda: steps - _counter.left
    finally:
        _counter.left, _counter.clock, _counter.time = before


def spend_steps(steps: int = 1) -> None:
    """`steps` of a microsecond or two each are about to be done."""
    left = _counter.left = _counter.left - steps
    if left < _counter.clock:
        _check_clock()


def _check_clock() -> None:
    _counter.clock = _counter.left - _CLOCK_INTERVAL
    if _counter.time.is_over() or _counter.left < 0:
        raise GrammarTooComplexError("it is too complex: compiling a grammar from it takes too much work")
