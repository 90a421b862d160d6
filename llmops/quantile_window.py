"""Quantiles of the last values of a distribution, and the order statistics that bound them."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

#: Binomial standard deviations between a quantile's rank and the order statistic that bounds it.
BOUND_DEVIATIONS = 2.0


class QuantileWindow:
    """The last `size` values of a distribution, so that its quantiles follow a change."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[float]:
        return iter(self._ordered)

    def add(self, value: float) -> None:
        """Add a value, and forget the oldest of a full window."""
        if len(self._arrived) == self._size:
            del self._ordered[bisect_left(self._ordered, self._arrived.popleft())]
        self._arrived.append(value)
        insort(self._ordered, value)

    def quantile(self, share: float) -> float | None:
        """Return a quantile, or None without values."""
        return self._ordered[min(len(self) - 1, int(len(self) * share))] if self._ordered else None

    def upper_bound(self, share: float) -> float | None:
        """Return the order statistic that bounds a quantile, or None with too few values."""
        size = len(self)
        rank = math.ceil(size * share + BOUND_DEVIATIONS * math.sqrt(size * share * (1 - share)))
        return self._ordered[rank] if rank < size else None
