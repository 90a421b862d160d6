"""Percentiles and how sure one can be of them."""

from __future__ import annotations

import math


def percentile(ordered: list[float], p: float) -> float:
    """The p-th percentile of sorted values, linear between neighbours (numpy's default)."""
    position = (len(ordered) - 1) * p / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def intervals(ordered: list[float], percentiles: tuple[int, ...]) -> dict[str, list[float]]:
    """95 % confidence intervals by percentile, `p50` and so on; those that `ordered` is too short for are left out.

    Distribution-free: the order statistics 1.96 binomial standard deviations around the percentile's rank.
    """
    found: dict[str, list[float]] = {}
    size = len(ordered)
    for p in percentiles:
        share = p / 100
        spread = 1.96 * math.sqrt(size * share * (1 - share))
        low, high = math.floor(size * share - spread) - 1, math.ceil(size * share + spread) - 1
        if low >= 0 and high < size:
            found[f"p{p}"] = [round(ordered[low], 4), round(ordered[high], 4)]
    return found
