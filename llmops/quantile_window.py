"""Quantiles of the most recent values of a distribution, and confidence bounds of the quantiles."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

#: Binomial standard deviations between the rank of a quantile and the rank of its upper bound:
#: about 97.7 % confidence.
BOUND_DEVIATIONS = 2.0


class QuantileWindow:
    """The last `size` values of a distribution, for quantiles that follow a change."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[float]:
        return iter(self._ordered)

    def add(self, value: float) -> None:
        """Add a value. Remove the oldest value if the window is full."""
        if len(self._arrived) == self._size:
            del self._ordered[bisect_left(self._ordered, self._arrived.popleft())]
        self._arrived.append(value)
        insort(self._ordered, value)

    def quantile(self, share: float) -> float | None:
        """Return the quantile `share` (0 to 1), or None if the window is empty."""
        return self._ordered[min(len(self) - 1, int(len(self) * share))] if self._ordered else None

    def upper_bound(self, share: float) -> float | None:
        """Return an upper confidence bound of the quantile `share`, or None with too few values."""
        size = len(self)
        rank = math.ceil(size * share + BOUND_DEVIATIONS * math.sqrt(size * share * (1 - share)))
        return self._ordered[rank] if rank < size else None
