"""The metrics of one gateway worker, and the meter that follows one answer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter

from prometheus_client import CollectorRegistry

from llmops.gateway.interfaces import Usage
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.goodput import GOODPUT_OUTCOMES, GoodputOutcome, LatencyObjectives
from llmops.gateway.telemetry.metric_definitions import MetricDefinition
from llmops.gateway.telemetry.metric_series import HistogramSeries, MetricFamily, ValueSeries

# tiers are made by whoever runs the gateway; were there ever more, the rest share one series
MAX_TIERS, DEFAULT_TIER, OTHER_TIERS = 16, "default", "other"
# how an answer ends that engine or gateway broke, in an Outcome's terms
FAILED_FINISH_REASONS = ("engine_lost", "error")


def _resident_bytes() -> float:
    """Bytes; not a number where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return math.nan


class GatewayMetrics:
    """All metrics of one gateway worker, in a registry of their own."""

    def __init__(self, objectives: Callable[[str], LatencyObjectives] = lambda model: LatencyObjectives()) -> None:
        """`objectives` of the model of that name."""
        self.registry = CollectorRegistry()
        self._families: dict[MetricDefinition, MetricFamily[ValueSeries]] = {}
        self._histograms: list[MetricFamily[HistogramSeries]] = []
        self._objectives = objectives
        self._models: dict[str, ModelMetrics] = {}
        self.requests = self.numbers(metric_definitions.REQUESTS)
        self.ignored = self.numbers(metric_definitions.IGNORED_FIELDS)
        self.refused = self.numbers(metric_definitions.REFUSED_CONNECTIONS)
        self.overhead = self.histogram(metric_definitions.OVERHEAD)
        self.stages = self.histogram(metric_definitions.STAGES)
        self.lag = self.histogram(metric_definitions.EVENT_LOOP_LAG).labels("main")
        self.held = self.numbers(metric_definitions.EVENT_LOOP_BLOCKED).labels()
        self.numbers(metric_definitions.MEMORY).labels().read = _resident_bytes
        self._servers = self.numbers(metric_definitions.SERVER_REACHABLE)
        self.of_models = ModelMetricFamilies(self)

    def numbers(self, name: MetricDefinition) -> MetricFamily[ValueSeries]:
        """The family of counters or gauges of that name; rooms that are not always there ask for theirs."""
        found = self._families.get(name)
        if found is None:
            found = self._families[name] = MetricFamily(self.registry, name, ValueSeries)
        return found

    def histogram(self, name: MetricDefinition) -> MetricFamily[HistogramSeries]:
        made = MetricFamily(self.registry, name, partial(HistogramSeries, name.buckets))
        self._histograms.append(made)
        return made

    def settle(self) -> None:
        """Count what the histograms have been told."""
        for family in self._histograms:
            for one in family.series():
                one.settle()

    def reaches(self, server: str, reached: Callable[[], bool] | None) -> None:
        """`reached` says whether the Triton server answered at the last look; None when it is used no longer."""
        if reached is None:
            self._servers.forget(server)
        else:
            self._servers.labels(server).read = lambda: float(reached())

    def model(self, model: str) -> ModelMetrics:
        """`model` is one that is served: each that is named here becomes a label."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self.of_models, model, self._objectives(model))
        return found

    def meter(self, model: str, started: float, tier: str = "") -> AnswerMeter:
        return AnswerMeter(self.model(model), started, tier)


class ModelMetricFamilies:
    """The families with the label `model`."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        numbers, histogram = metrics.numbers, metrics.histogram
        self.ttft, self.tpot, self.waiting = (
            histogram(metric_definitions.TTFT),
            histogram(metric_definitions.TPOT),
            numbers(metric_definitions.QUEUE_DEPTH),
        )
        self.answers = numbers(metric_definitions.ANSWERS)
        self.prompt_tokens, self.looked_up = (
            numbers(metric_definitions.PROMPT_TOKENS),
            numbers(metric_definitions.PREFIX_LOOKUP_TOKENS),
        )
        self.cached, self.completion_tokens = (
            numbers(metric_definitions.PREFIX_CACHED_TOKENS),
            numbers(metric_definitions.COMPLETION_TOKENS),
        )
        self.cancelled, self.active = (
            numbers(metric_definitions.CANCELLED_REQUESTS),
            numbers(metric_definitions.ACTIVE_STREAMS),
        )
        self.itl, self.duration = histogram(metric_definitions.ITL), histogram(metric_definitions.DURATION)


class ModelMetrics:
    """One model's part of them; looking up labels again and again would cost each request several microseconds."""

    def __init__(self, families: ModelMetricFamilies, model: str, objectives: LatencyObjectives) -> None:
        self.objectives = objectives
        self.ttft, self.tpot = families.ttft.labels(model), families.tpot.labels(model)
        # all of them from the start: a ratio of series that do not exist is nothing, and not 0
        self.answers: Mapping[GoodputOutcome, ValueSeries] = {
            one: families.answers.labels(model, one) for one in GOODPUT_OUTCOMES
        }
        self.prompt_tokens = families.prompt_tokens.labels(model)
        self.looked_up, self.cached = families.looked_up.labels(model), families.cached.labels(model)
        self.completion_tokens = families.completion_tokens.labels(model)
        self.cancelled, self.active = families.cancelled.labels(model), families.active.labels(model)
        self.itl, self.duration = families.itl.labels(model), families.duration.labels(model)
        self._model, self._waiting = model, families.waiting
        self._tiers: dict[str, ValueSeries] = {}
        self.waiting("")

    def waiting(self, tier: str) -> ValueSeries:
        """The queue of a caller's tier."""
        found = self._tiers.get(tier)
        if found is None:
            name = tier or DEFAULT_TIER
            if len(self._tiers) >= MAX_TIERS:
                return self._waiting.labels(self._model, OTHER_TIERS)
            found = self._tiers[tier] = self._waiting.labels(self._model, name)
        return found


class AnswerMeter:
    """Follows one answer from the moment that its request may wait; `submitted` when the engine has it, then `end`, or
    `refused` where it never came so far.

    `first` and `last`: when tokens first and last came (perf_counter), or 0; `total`: how many; `outcome`: how it
    ended, None before, and where the request itself was wrong.
    """

    __slots__ = (
        "_ended",
        "_left",
        "_metrics",
        "_prompt",
        "_sequences",
        "_started",
        "_wait",
        "first",
        "last",
        "outcome",
        "total",
    )

    def __init__(self, metrics: ModelMetrics, started: float, tier: str) -> None:
        """`started` is perf_counter() at the request's arrival."""
        self._metrics = metrics
        self._started = started
        self.first = self.last = 0.0
        self.total = self._prompt = 0
        self._sequences = 1
        self._ended = self._left = False
        self.outcome: GoodputOutcome | None = None
        self._wait: ValueSeries | None = metrics.waiting(tier)
        self._wait.value += 1

    def submitted(self, prompt_tokens: int, sequences: int) -> None:
        """The engine has the request, and generates as many sequences at once."""
        self._prompt, self._sequences = prompt_tokens, sequences
        self._metrics.active.value += 1
        self._metrics.prompt_tokens.value += prompt_tokens

    def tokens(self, count: int) -> None:
        """`count` tokens came in one message."""
        now = perf_counter()
        if self.last == 0.0:
            self.first = now
            self._metrics.ttft.observe(now - self._started)
            self._waits_no_more()
        elif count == 1:
            self._metrics.itl.observe(now - self.last)
        elif count:
            self._metrics.itl.observe_repeated((now - self.last) / count, count)
        self.last = now
        self.total += count

    def forget(self, count: int) -> None:
        """So many of them are no part of the answer."""
        self.total -= count

    def cancelled(self) -> None:
        """The client left."""
        self._left = True
        self._metrics.cancelled.value += 1

    def refused(self, outcome: GoodputOutcome | None) -> None:
        """It ended before there was an answer; None where the request itself was wrong."""
        self._ended = True
        self._waits_no_more()
        if outcome == "aborted":
            self.cancelled()
            outcome = self._judged(self.tpot)
        self.outcome = outcome
        if outcome is not None:
            self._metrics.answers[outcome].value += 1

    def end(self, usage: Usage, finish: str) -> None:
        """`finish` in an Outcome's terms (messages.py)."""
        if self._ended:
            return
        self._ended = True
        self._waits_no_more()
        metrics = self._metrics
        metrics.active.value -= 1
        metrics.completion_tokens.value += usage.completion_tokens
        if usage.cached_tokens is not None:
            metrics.looked_up.value += self._prompt
            metrics.cached.value += usage.cached_tokens
        if self.last:
            metrics.duration.observe(self.last - self._started)
        tpot = self.tpot
        if tpot is not None:
            metrics.tpot.observe(tpot * 1e3)
        self._left = self._left or finish == "cancelled"
        self.outcome = "failed" if finish in FAILED_FINISH_REASONS else self._judged(tpot)
        metrics.answers[self.outcome].value += 1

    def _judged(self, tpot: float | None) -> GoodputOutcome:
        first = self.first or perf_counter()
        return self._metrics.objectives.judge(first - self._started, tpot, left=self._left)

    @property
    def ttft(self) -> float | None:
        """Seconds from the request's arrival; None before."""
        return self.first - self._started if self.first else None

    @property
    def tpot(self) -> float | None:
        """Seconds; the sequences of a request come side by side."""
        after_first = self.total / self._sequences - 1
        return (self.last - self.first) / after_first if after_first > 0 else None

    def _waits_no_more(self) -> None:
        if self._wait is not None:
            self._wait.value -= 1
            self._wait = None
