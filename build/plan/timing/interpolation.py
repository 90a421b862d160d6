"""Interpolate in measured tables.

The requested points lie between the points of a logarithmic grid, or beyond the grid's border.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import product


class InterpolationGrid:
    """A grid with values at most of its points.

    `at` interpolates the logarithm of values linearly in the logarithms of the coordinates. Outside
    the grid, the value of the nearest border point holds. A point without a value takes the values
    of its neighbours.
    """

    def __init__(self, points: Mapping[tuple[int, ...], float]) -> None:
        axes = len(next(iter(points)))
        self.ticks = [sorted({point[axis] for point in points}) for axis in range(axes)]
        self._logs = [[math.log(tick) for tick in ticks] for ticks in self.ticks]
        self._values = {point: math.log(value) for point, value in points.items()}

    def at(self, *coordinates: float) -> float:
        """Return the interpolated value at any point.

        If no surrounding point was measured, the result is the value of the nearest measured point.
        """
        corners = [self._bracket(axis, value) for axis, value in enumerate(coordinates)]
        total = weight_sum = 0.0
        for corner in product(*corners):
            value = self._values.get(tuple(tick for tick, _ in corner))
            weight = math.prod(weight for _, weight in corner)
            if value is not None and weight > 0:
                total += weight * value
                weight_sum += weight
        if not weight_sum:
            return math.exp(self._nearest(coordinates))
        return math.exp(total / weight_sum)

    def _nearest(self, coordinates: tuple[float, ...]) -> float:
        def distance(point: tuple[int, ...]) -> float:
            return sum(abs(math.log(tick / coordinate)) for tick, coordinate in zip(point, coordinates, strict=True))

        return self._values[min(self._values, key=distance)]

    def _bracket(self, axis: int, value: float) -> Iterable[tuple[int, float]]:
        ticks, logs = self.ticks[axis], self._logs[axis]
        if value <= ticks[0]:
            return ((ticks[0], 1.0),)
        if value >= ticks[-1]:
            return ((ticks[-1], 1.0),)
        above = bisect_right(ticks, value)
        share = (math.log(value) - logs[above - 1]) / (logs[above] - logs[above - 1])
        return ((ticks[above - 1], 1 - share), (ticks[above], share))
