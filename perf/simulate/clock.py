"""Simulated time: what is to happen, in the order in which it does."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """`now` in seconds. Of two things at the same time the one that was planned first happens first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = self._repeating = 0

    def at(self, when: float, happen: Callable[..., None], *args: Any) -> None:
        """`happen` is called with `args` then."""
        self._planned += 1
        heappush(self._heap, (when, self._planned, happen, args))

    def every(self, seconds: float, happen: Callable[[], None]) -> None:
        """Call `happen` now and every `seconds`, as long as anything is planned that happens once."""
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
        """Nothing is planned any more that happens once."""
        return len(self._heap) <= self._repeating

    def run(self) -> None:
        """Until nothing is planned any more."""
        heap = self._heap
        while heap:
            self.now, _, happen, args = heappop(heap)
            happen(*args)
