"""How much work one grammar may take: counted, so that a schema is refused on every machine or on none.

Whatever may grow faster than what a client sent calls `spend`, so a thread that makes a grammar ends by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

from llmops.clocks import Countdown
from llmops.gateway.answers.grammar.errors import TooCostlyError

# what one grammar may take: in steps about 3 s of CPU; the clock is for what is not counted well
STEPS, SECONDS = 2_000_000, 5.0
_LOOKED_AT = 1 << 12
# what the time between two looks counts at most (s): some hundred times what the steps take
_LONGEST = 0.5


class _Meter(threading.local):
    """Of this thread. Outside of `metered` nothing is counted."""

    left = float("inf")
    clock = float("inf")
    time = Countdown(float("inf"), _LONGEST, thread_time)


_meter = _Meter()


@contextmanager
def metered(steps: float, seconds: float = SECONDS) -> Iterator[Callable[[], float]]:
    """Raises TooCostlyError from the `spend` that goes over `steps` or `seconds` of CPU. Gives what says how much was
    spent."""
    before = _meter.left, _meter.clock, _meter.time
    _meter.left, _meter.clock, _meter.time = steps, steps - _LOOKED_AT, Countdown(seconds, _LONGEST, thread_time)
    try:
        yield lambda: steps - _meter.left
    finally:
        _meter.left, _meter.clock, _meter.time = before


def spend(steps: int = 1) -> None:
    """`steps` of a microsecond or two each are about to be done."""
    left = _meter.left = _meter.left - steps
    if left < _meter.clock:
        _look()


def _look() -> None:
    _meter.clock = _meter.left - _LOOKED_AT
    if _meter.time.is_over() or _meter.left < 0:
        raise TooCostlyError("it is too complex: compiling a grammar from it takes too much work")
