"""Prometheus metrics, cheap enough for every token.

prometheus-client's own histograms take a lock and a label look-up per observation; here a stream counts into plain
lists that a collector reads when scraped. Everything runs on one event loop, so no lock is needed.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Series:
    """One label value's buckets."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(SECONDS, value)] += times
        self.total += value * times


class Histogram(Collector):
    """A histogram with one label."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, label: str = "model") -> None:
        self._name, self._text, self._label = name, text, label
        self._series: dict[str, Series] = {}
        registry.register(self)

    def labels(self, value: str) -> Series:
        series = self._series.get(value)
        if series is None:
            series = self._series[value] = Series()
        return series

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for value, series in list(self._series.items()):
            running, buckets = 0, []
            for bound, count in zip([*map(str, SECONDS), "+Inf"], series.counts, strict=True):
                running += count
                buckets.append((bound, running))
            family.add_metric([value], buckets, series.total)
        yield family


def _resident() -> float:
    """Bytes; not a number where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return math.nan


class Metrics:
    """All metrics of one gateway worker, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "llmops_requests", "Requests by route and HTTP status.", ["route", "status"], registry=self.registry
        )
        self.prompt_tokens = Counter(
            "llmops_prompt_tokens", "Tokens of the prompts.", ["model"], registry=self.registry
        )
        self.completion_tokens = Counter(
            "llmops_completion_tokens", "Tokens generated for answers.", ["model"], registry=self.registry
        )
        self.cancelled = Counter(
            "llmops_cancelled_requests", "Requests whose client went away.", ["model"], registry=self.registry
        )
        self.ignored = Counter(
            "llmops_ignored_fields", "Request fields accepted and ignored.", ["field"], registry=self.registry
        )
        self.refused = Counter(
            "llmops_refused_connections",
            "Connections closed because a client kept to none of its bounds, or there was no place.",
            ["reason"],
            registry=self.registry,
        )
        self.lag = Histogram(
            self.registry,
            "llmops_event_loop_lag_seconds",
            "How late the event loop was with a timer of 40 ms.",
            label="loop",
        ).labels("main")
        self.held = Counter(
            "llmops_event_loop_held_seconds",
            "Time in which the gateway's own work kept the event loop from anything else for over 50 ms.",
            registry=self.registry,
        )
        # prometheus-client's name for it; its own collector also tells what cannot be added up over workers
        memory = Gauge("process_resident_memory_bytes", "Resident memory size in bytes.", registry=self.registry)
        memory.set_function(_resident)
        self.active = Gauge("llmops_active_streams", "Answers in progress.", ["model"], registry=self.registry)
        self.ttft = Histogram(
            self.registry, "llmops_time_to_first_token_seconds", "From the request's arrival to its first token."
        )
        self.itl = Histogram(
            self.registry, "llmops_inter_token_latency_seconds", "Between two messages of an answer, per token."
        )
        self.tpot = Histogram(
            self.registry, "llmops_time_per_output_token_seconds", "Mean time per token after the first, per answer."
        )
        self.duration = Histogram(
            self.registry, "llmops_request_duration_seconds", "From the request's arrival to its last token."
        )
        self.overhead = Histogram(
            self.registry, "llmops_overhead_seconds", "The gateway's own time until the answer begins.", label="stage"
        )
        self.stages = Histogram(
            self.registry, "llmops_stage_seconds", "What the time until the answer begins was spent on.", label="stage"
        )

        self._models: dict[str, ModelMetrics] = {}

    def meter(self, model: str, started: float, prompt_tokens: int) -> Meter:
        """`model` is one that is served: each that is named here becomes a label."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self, model)
        return Meter(found, started, prompt_tokens)


class ModelMetrics:
    """One model's part of them; looking up labels again and again would cost each request several microseconds."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.completion_tokens = metrics.completion_tokens.labels(model)
        self.cancelled = metrics.cancelled.labels(model)
        self.active = metrics.active.labels(model)
        self.ttft = metrics.ttft.labels(model)
        self.itl = metrics.itl.labels(model)
        self.tpot = metrics.tpot.labels(model)
        self.duration = metrics.duration.labels(model)


class Meter:
    """Follows one answer. `started` is perf_counter() at the request's arrival, `last` when tokens last came (or 0)."""

    __slots__ = ("_ended", "_first", "_metrics", "_started", "_tokens", "last")

    def __init__(self, metrics: ModelMetrics, started: float, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._started = started
        self._first = self.last = 0.0
        self._tokens = 0
        self._ended = False
        metrics.active.inc()
        metrics.prompt_tokens.inc(prompt_tokens)

    def tokens(self, count: int) -> None:
        """`count` tokens came in one message."""
        now = perf_counter()
        if self.last == 0.0:
            self._first = now
            self._metrics.ttft.observe(now - self._started)
        elif count:
            self._metrics.itl.observe((now - self.last) / count, count)
        self.last = now
        self._tokens += count

    def cancelled(self) -> None:
        self._metrics.cancelled.inc()

    def end(self, completion_tokens: int) -> None:
        if self._ended:
            return
        self._ended = True
        self._metrics.active.dec()
        self._metrics.completion_tokens.inc(completion_tokens)
        if self.last:
            self._metrics.duration.observe(self.last - self._started)
        if self._tokens > 1:
            self._metrics.tpot.observe((self.last - self._first) / (self._tokens - 1))
