"""Pages of /metrics as numbers, and what was counted between two of them."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

from llmops.untrusted_text import escape_unsafe

#: Characters of a label that are shown: a longer name would fill the screen.
MAX_LABEL_LENGTH = 100
#: Larger numbers, and what is no number, are no counts of anything.
MAX_VALUE = 1e18
Labels = Mapping[str, str]
_Series = dict[frozenset[tuple[str, str]], float]


class MetricsPage:
    """One exposition. `at`: when it came, by a monotonic clock (s)."""

    def __init__(self, text: str, at: float) -> None:
        """Raises ValueError for a text that is none of Prometheus'."""
        self.at = at
        self._series: dict[str, _Series] = defaultdict(dict)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if abs(sample.value) < MAX_VALUE:
                        labels = (
                            (name, escape_unsafe(value, MAX_LABEL_LENGTH)) for name, value in sample.labels.items()
                        )
                        self._series[sample.name][frozenset(labels)] = sample.value
        except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            # what the parser stumbles over in other texts
            raise ValueError(f"not metrics ({type(error).__name__})") from error

    def __contains__(self, name: str) -> bool:
        return name in self._series

    def series(self, name: str) -> Iterator[tuple[Labels, float]]:
        """Labels and value of each."""
        for labels, value in self._series.get(name, {}).items():
            yield dict(labels), value

    def increases(self, name: str, before: MetricsPage) -> Iterator[tuple[Labels, float]]:
        """What each counter of that name was raised by since then. One that fell began anew, as its process did."""
        known = before._series.get(name, {})
        for labels, value in self._series.get(name, {}).items():
            last = known.get(labels, 0.0)
            yield dict(labels), value - last if value >= last else value


class MetricsWindow:
    """The pages of one process within a window: rates are between its first and its last."""

    def __init__(self, window: float) -> None:
        """`window` in seconds."""
        self._window = window
        self._pages: deque[MetricsPage] = deque()

    def add(self, page: MetricsPage) -> None:
        self._pages.append(page)
        while len(self._pages) > 2 and self._pages[1].at <= page.at - self._window:
            self._pages.popleft()

    def clear(self) -> None:
        """It was away: what it counts from now on may have another beginning."""
        self._pages.clear()

    @property
    def last(self) -> MetricsPage | None:
        return self._pages[-1] if self._pages else None

    @property
    def seconds(self) -> float:
        """Between the two; 0 where there is one page alone."""
        return self._pages[-1].at - self._pages[0].at if len(self._pages) > 1 else 0.0

    def increases(self, name: str) -> Iterator[tuple[Labels, float]]:
        if self.seconds > 0:
            yield from self._pages[-1].increases(name, self._pages[0])


class LabelSums:
    """Values added up by a label, over any number of pages."""

    def __init__(self, *labels: str) -> None:
        self._labels = labels
        self.values: dict[tuple[str, ...], float] = defaultdict(float)

    def add(self, series: Iterator[tuple[Labels, float]], factor: float = 1.0) -> None:
        for labels, value in series:
            self.values[tuple(labels.get(name, "") for name in self._labels)] += value * factor

    def of(self, *values: str) -> dict[str, float]:
        """By the last label, where those before it have these values."""
        return {key[-1]: value for key, value in self.values.items() if key[:-1] == values}


def quantile(share: float, buckets: Mapping[str, float]) -> float | None:
    """Of cumulative counts by upper bound (`le`), as PromQL's histogram_quantile has it: evenly within a bucket, and
    the highest bound for what is above it. None where nothing was counted."""
    known = ((_bound(bound), count) for bound, count in buckets.items())
    bounds = sorted((bound, count) for bound, count in known if not math.isnan(bound))
    if len(bounds) < 2 or not math.isinf(bounds[-1][0]) or bounds[-1][1] <= 0:
        return None
    rank = share * bounds[-1][1]
    lower, below = 0.0, 0.0
    for upper, count in bounds[:-1]:
        if count >= rank:
            return lower + (upper - lower) * (rank - below) / (count - below) if count > below else upper
        lower, below = upper, count
    return lower


def _bound(text: str) -> float:
    """Return the upper bound of a bucket, NaN for a text that is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
