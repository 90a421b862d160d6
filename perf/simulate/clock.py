"""Simulated time: a queue of calls with their times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """A simulated clock. `now` is in seconds.

    Calls with the same time run in the order in which they were scheduled.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = self._repeating = 0

    def at(self, when: float, happen: Callable[..., None], *args: Any) -> None:
        """Schedule the call `happen(*args)` at the simulated time `when`, in seconds."""
        self._planned += 1
        heappush(self._heap, (when, self._planned, happen, args))

    def every(self, seconds: float, happen: Callable[[], None]) -> None:
        """Call `happen` now and every `seconds`, until only such repeated calls are scheduled."""
        self._repeating += 1
        self._repeat(seconds, happen)

    def _repeat(self, seconds: float, happen: Callable[[], None]) -> None:
        happen()
        if len(self._heap) >= self._repeating:
            self.at(self.now + seconds, self._repeat, seconds, happen)
        else:
            self._repeating -= 1

    @property
    def is_over(self) -> bool:
        """Return True if only repeated calls (see `every`) are scheduled."""
        return len(self._heap) <= self._repeating

    def run(self) -> None:
        """Run the scheduled calls in order of time until none is left."""
        heap = self._heap
        while heap:
            self.now, _, happen, args = heappop(heap)
            happen(*args)
