"""A linear axis of a plot, its round ticks, and how its numbers are written."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Data from `low` to `high` onto pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of `value`."""
        return round(self.start + (value - self.low) / self._span * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """About five round values."""
        power = 10 ** math.floor(math.log10(self._span / 4))
        step = next(power * m for m in (1, 2, 5, 10) if self._span / (power * m) <= 5)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]

    @property
    def _span(self) -> float:
        return (self.high - self.low) or 1.0


def format_number(value: float) -> str:
    """Four digits at most after rounding, thousands apart: 0.28, 14.03, 538.1, 12,500."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{float(f'{value:.4g}'):g}"
