"""Clocks: the time of day, and what a thread has left of the processor's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial

utc_now: Callable[[], datetime] = partial(datetime.now, timezone.utc)


class Countdown:
    """Seconds of CPU that a thread has left. They go on in a thread whose virtual machine stands still, so what passes
    between two looks counts as `longest` at most."""

    __slots__ = ("_clock", "_left", "_longest", "_looked")

    def __init__(self, seconds: float, longest: float, clock: Callable[[], float]) -> None:
        self._left, self._longest, self._clock, self._looked = seconds, longest, clock, clock()

    def is_over(self) -> bool:
        now = self._clock()
        self._left -= min(now - self._looked, self._longest)
        self._looked = now
        return self._left < 0
