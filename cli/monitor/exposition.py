"""Parsing of metrics pages, and increases of counters between two pages."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

from llmops.gateway.telemetry.metric_definitions import ENGINE_BLOCKS, ENGINE_REQUESTS, GATEWAY_METRICS
from llmops.untrusted_text import escape_unsafe

#: Maximum number of characters shown of a label. A longer name would fill the screen.
MAX_LABEL_LENGTH = 100
#: The largest plausible value of a count. Larger numbers and NaN are ignored.
MAX_VALUE = 1e18
#: Maximum number of characters of a line. The parser's work grows with the square of the number of
#: labels.
MAX_LINE_LENGTH = 8192
#: Maximum number of lines of a metrics page; longer pages are rejected. A gateway with a hundred
#: models has 20,000.
MAX_SAMPLES = 50_000
#: Names of the samples that are kept. A page may have any number of others, which would fill the
#: memory.
SAMPLE_NAMES = frozenset(
    name + part
    for name in (ENGINE_REQUESTS, ENGINE_BLOCKS, *(one.name for one in GATEWAY_METRICS))
    for part in ("", "_bucket", "_count", "_sum")
)
Labels = Mapping[str, str]
_Series = dict[frozenset[tuple[str, str]], float]


class MetricsPage:
    """A parsed metrics page. `at` is the time of arrival, in seconds of a monotonic clock."""

    def __init__(self, text: str, at: float) -> None:
        """Parse a page that was read at the time `at`.

        Raises:
            ValueError: The page is not in Prometheus' text format, or is too large.
        """
        self.at = at
        self._series: dict[str, _Series] = defaultdict(dict)
        if text.count("\n") > MAX_SAMPLES:
            raise ValueError("it has more than 50,000 lines")
        if max(map(len, text.split("\n"))) > MAX_LINE_LENGTH:
            raise ValueError("it has a line of more than 8,192 characters")
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name in SAMPLE_NAMES and abs(sample.value) < MAX_VALUE:
                        labels = (
                            (name, escape_unsafe(value, MAX_LABEL_LENGTH)) for name, value in sample.labels.items()
                        )
                        self._series[sample.name][frozenset(labels)] = sample.value
        except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            # the parser raises various errors for texts that are not in the format
            raise ValueError(f"it is not a page of metrics ({type(error).__name__})") from error

    def series(self, name: str) -> Iterator[tuple[Labels, float]]:
        """Yield the labels and the value of each sample of the metric `name`."""
        for labels, value in self._series.get(name, {}).items():
            yield dict(labels), value

    def increases(self, name: str, before: MetricsPage) -> Iterator[tuple[Labels, float]]:
        """Yield the labels and the increase of each counter `name` since the earlier page `before`.

        A counter that fell was restarted from 0.
        """
        known = before._series.get(name, {})
        for labels, value in self._series.get(name, {}).items():
            last = known.get(labels, 0.0)
            yield dict(labels), value - last if value >= last else value


#: Maximum number of pages that a window keeps. A page that arrives too soon after the page before
#: it replaces that page.
MAX_PAGES = 4


class MetricsWindow:
    """The pages of one process within a time window.

    Rates are computed between the first and the last page.
    """

    def __init__(self, window: float) -> None:
        """Create a window without pages.

        Args:
            window: Length of the window in seconds.
        """
        self._window = window
        self._pages: deque[MetricsPage] = deque()

    def add(self, page: MetricsPage) -> None:
        if len(self._pages) > 1 and self._pages[-1].at - self._pages[-2].at < self._window / MAX_PAGES:
            self._pages.pop()
        self._pages.append(page)
        while len(self._pages) > 2 and self._pages[1].at <= page.at - self._window:
            self._pages.popleft()

    def clear(self) -> None:
        """Forget all pages. After an outage, the counters may have been restarted."""
        self._pages.clear()

    @property
    def last(self) -> MetricsPage | None:
        return self._pages[-1] if self._pages else None

    @property
    def seconds(self) -> float:
        """Return the seconds between the first and the last page, or 0 if there are fewer than two."""
        return self._pages[-1].at - self._pages[0].at if len(self._pages) > 1 else 0.0

    def increases(self, name: str) -> Iterator[tuple[Labels, float]]:
        if self.seconds > 0:
            yield from self._pages[-1].increases(name, self._pages[0])


class LabelSums:
    """The sums of samples over any number of pages, by label values."""

    def __init__(self, *labels: str) -> None:
        self._labels = labels
        self.values: dict[tuple[str, ...], float] = defaultdict(float)

    def add(self, series: Iterator[tuple[Labels, float]], factor: float = 1.0) -> None:
        for labels, value in series:
            self.values[tuple(labels.get(name, "") for name in self._labels)] += value * factor

    def of(self, *values: str) -> dict[str, float]:
        """Return the sums by the last label, for samples whose other labels have these values."""
        return {key[-1]: value for key, value in self.values.items() if key[:-1] == values}


def quantile(share: float, buckets: Mapping[str, float]) -> float | None:
    """Return a quantile of cumulative bucket counts by upper bound (`le`).

    The quantile is computed like PromQL's histogram_quantile.

    Values are assumed to be evenly distributed within a bucket. The result is the highest finite
    bound for values above it, and None without observations.
    """
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
    """Return the upper bound of a bucket, or NaN if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
