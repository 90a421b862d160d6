"""Numbers that are counted into and read when scraped, cheap enough for every token.

prometheus-client's own take a lock and a label look-up per observation. Everything here runs on one event loop, so no
lock is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llmops.gateway.observability.names import Name


class Number:
    """One counter or gauge; `read` instead of a value where somebody else keeps it."""

    __slots__ = ("read", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.read: Callable[[], float] | None = None

    def inc(self, by: float = 1.0) -> None:
        self.value += by

    def dec(self) -> None:
        self.value -= 1.0


class Buckets:
    """One histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_each(self, value: float, times: int) -> None:
        """`value`, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> Iterator[tuple[str, float]]:
        """(upper bound, how many are not above it), as Prometheus has them."""
        running = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            running += count
            yield bound, running


S = TypeVar("S", Number, Buckets)


class Family(Collector, Generic[S]):
    """All series of one name, by the values of its labels."""

    def __init__(self, registry: CollectorRegistry, name: Name, make: Callable[[], S]) -> None:
        self._name = name
        self._make: Callable[[], S] = make
        self._series: dict[tuple[str, ...], S] = {}
        registry.register(self)

    def labels(self, *values: str) -> S:
        """The series with these values, which a client must not be able to choose freely."""
        found = self._series.get(values)
        if found is None:
            if len(values) != len(self._name.labels):
                raise ValueError(f"{self._name.name} has the labels {self._name.labels}, not {values}")
            found = self._series[values] = self._make()
        return found

    def forget(self, *values: str) -> None:
        """The series is about something that is no more."""
        self._series.pop(values, None)

    def collect(self) -> Iterator[Metric]:
        name = self._name
        series = [(list(values), one) for values, one in self._series.items()]
        if name.kind == "histogram":
            histogram = HistogramMetricFamily(name.name, name.meaning, labels=name.labels)
            for values, one in series:
                if isinstance(one, Buckets):
                    histogram.add_metric(values, list(one.cumulative()), one.total)
            yield histogram
            return
        kind = CounterMetricFamily if name.kind == "counter" else GaugeMetricFamily
        family = kind(name.name, name.meaning, labels=name.labels)
        for values, one in series:
            if isinstance(one, Number):
                family.add_metric(values, one.read() if one.read is not None else one.value)
        yield family
