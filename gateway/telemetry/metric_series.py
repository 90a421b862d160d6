"""Counters, gauges and histograms that are cheap enough to update for every token.

The series of prometheus-client take a lock for each observation. The series of this module are used
on one event loop and need no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llmops.gateway.telemetry.metric_definitions import MetricDefinition


class ValueSeries:
    """A counter or gauge. If `read` is set, each scrape exports the value that `read` returns."""

    def __init__(self) -> None:
        self.value = 0.0
        self.read: Callable[[], float] | None = None

    def inc(self, by: float = 1.0) -> None:
        self.value += by


class HistogramSeries:
    """A histogram that sorts its values into buckets later.

    `observe` only appends the value to a list, so that no token waits for the search of its bucket.
    Call `settle` regularly to sort the values into buckets.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._fresh: list[float] = []
        self.observe: Callable[[float], None] = self._fresh.append

    def observe_repeated(self, value: float, times: int) -> None:
        """Observe the same `value` the given number of times."""
        self._fresh.extend([value] * times)

    def settle(self) -> None:
        """Sort the observed values into buckets."""
        if self._fresh:
            for at, times in Counter(map(partial(bisect_left, self._bounds), self._fresh)).items():
                self._counts[at] += times
            self._total += sum(self._fresh)
            self._fresh.clear()

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return the count per bucket and the sum of all values.

        The counts are pairs of the bucket's upper bound as text and the cumulative count, as
        Prometheus exports them.
        """
        self.settle()
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True)), self._total


SeriesType = TypeVar("SeriesType", ValueSeries, HistogramSeries)


class MetricFamily(Collector, Generic[SeriesType]):
    """All series of one metric, keyed by their label values."""

    def __init__(self, registry: CollectorRegistry, name: MetricDefinition, make: Callable[[], SeriesType]) -> None:
        self._name = name
        self._make: Callable[[], SeriesType] = make
        self._series: dict[tuple[str, ...], SeriesType] = {}
        registry.register(self)

    def labels(self, *values: str) -> SeriesType:
        """Return the series with these label values, which is created at the first call.

        Do not pass values that clients choose freely: each new value occupies memory for good.
        """
        found = self._series.get(values)
        if found is None:
            if len(values) != len(self._name.labels):
                raise ValueError(f"{self._name.name} has the labels {self._name.labels}, not {values}")
            found = self._series[values] = self._make()
        return found

    def forget(self, *values: str) -> None:
        """Remove the series of an object that no longer exists."""
        self._series.pop(values, None)

    def series(self) -> Iterable[SeriesType]:
        return self._series.values()

    def collect(self) -> Iterator[Metric]:
        name = self._name
        series = [(list(values), one) for values, one in self._series.items()]
        if name.kind == "histogram":
            histogram = HistogramMetricFamily(name.name, name.meaning, labels=name.labels)
            for values, one in series:
                if isinstance(one, HistogramSeries):
                    histogram.add_metric(values, *one.read())
            yield histogram
            return
        kind = CounterMetricFamily if name.kind == "counter" else GaugeMetricFamily
        family = kind(name.name, name.meaning, labels=name.labels)
        for values, one in series:
            if isinstance(one, ValueSeries):
                family.add_metric(values, one.read() if one.read is not None else one.value)
        yield family
