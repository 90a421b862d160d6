"""The metrics of one gateway, the goodput of its answers, and the meter of one answer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple, get_args

from prometheus_client import CollectorRegistry

from llmops.gateway.interfaces import Usage
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.metric_definitions import MetricDefinition
from llmops.gateway.telemetry.metric_series import HistogramSeries, MetricFamily, ValueSeries
from llmops.objectives import AVAILABILITY, Objective, goodput_limits

#: Tiers with a metric series of their own. Operators define tiers; more of them than this share one
#: series.
MAX_TIERS = 16
#: Label of callers without a tier.
DEFAULT_TIER = "default"
#: Label of the series that the other tiers share.
OTHER_TIERS = "other"
#: Finish reasons, as in Outcome, of answers on which the engine or the gateway failed.
FAILED_FINISH_REASONS = ("engine_lost", "error")

#: How an answer ended: good, first token too late, later tokens too slow, failed by the engine or
#: the gateway, shed because too many requests wait, aborted by the client.
GoodputOutcome = Literal["good", "late", "slow", "failed", "shed", "aborted"]
GOODPUT_OUTCOMES: tuple[GoodputOutcome, ...] = get_args(GoodputOutcome)


#: Returns the objectives of a model for a tier.
ObjectivesOf = Callable[[str, str], Sequence[Objective]]


class LatencyObjectives(NamedTuple):
    """The latencies of a good answer, in seconds: to the first token, per token after it, and whole.

    None: no objective.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def judge(self, ttft: float, tpot: float | None, e2e: float = 0.0, *, left: bool) -> GoodputOutcome:
        """Return the outcome of an answer that did not fail.

        A client that leaves after an objective was missed counts against the objective.

        Args:
            ttft: Seconds to the first token, or the wait so far without one.
            tpot: Seconds per token after the first; None for fewer than two tokens.
            e2e: Seconds to the last token, or to now without one.
            left: True if the client left.
        """
        if self.ttft is not None and ttft > self.ttft:
            return "late"
        if self.tpot is not None and tpot is not None and tpot > self.tpot:
            return "slow"
        if self.e2e is not None and e2e > self.e2e:
            return "slow"
        return "aborted" if left else "good"


def _resident_bytes() -> float:
    """Return the resident memory in bytes; NaN on systems without /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return math.nan


class GatewayMetrics:
    """All metrics of one gateway, in a registry of their own."""

    def __init__(self, objectives: ObjectivesOf = lambda model, tier: ()) -> None:
        """Create the metrics. `objectives` returns the objectives of a model for a tier."""
        self.registry = CollectorRegistry()
        self._families: dict[MetricDefinition, MetricFamily[ValueSeries]] = {}
        self._histograms: list[MetricFamily[HistogramSeries]] = []
        self._objectives = objectives
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
        #: Returns the metrics of a served model. Each name that is passed becomes a label value.
        self.model: Callable[[str], ModelMetrics] = cache(self._make_model)

    def numbers(self, name: MetricDefinition) -> MetricFamily[ValueSeries]:
        """Return the counters or gauges of a definition. The first call registers them."""
        found = self._families.get(name)
        if found is None:
            found = self._families[name] = MetricFamily(self.registry, name, ValueSeries)
        return found

    def histogram(self, name: MetricDefinition) -> MetricFamily[HistogramSeries]:
        made = MetricFamily(self.registry, name, partial(HistogramSeries, name.buckets))
        self._histograms.append(made)
        return made

    def settle(self) -> None:
        """Sort the observed values of all histograms into buckets."""
        for family in self._histograms:
            for one in family.series():
                one.settle()

    def reaches(self, server: str, reached: Callable[[], bool] | None) -> None:
        """Export whether a Triton server is reachable, as `reached` returns it.

        `reached` is None as soon as the server is not used any longer.
        """
        if reached is None:
            self._servers.forget(server)
        else:
            self._servers.labels(server).read = lambda: float(reached())

    def _make_model(self, model: str) -> ModelMetrics:
        return ModelMetrics(self.of_models, model, partial(self._objectives, model))


class ModelMetricFamilies:
    """The metrics with the label `model`."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        numbers, histogram = metrics.numbers, metrics.histogram
        self.ttft, self.tpot, self.waiting = (
            histogram(metric_definitions.TTFT),
            histogram(metric_definitions.TPOT),
            numbers(metric_definitions.QUEUE_DEPTH),
        )
        self.answers = numbers(metric_definitions.ANSWERS)
        self.slo_requests = numbers(metric_definitions.SLO_REQUESTS)
        self.slo_targets = numbers(metric_definitions.SLO_TARGET)
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
    """The series of one model.

    Looking up labels for each request would cost several microseconds.
    """

    def __init__(
        self, families: ModelMetricFamilies, model: str, objectives: Callable[[str], Sequence[Objective]]
    ) -> None:
        self.ttft, self.tpot = families.ttft.labels(model), families.tpot.labels(model)
        # all outcomes from the start: a ratio of missing series is no data and not 0
        self.answers: Mapping[GoodputOutcome, ValueSeries] = {
            one: families.answers.labels(model, one) for one in GOODPUT_OUTCOMES
        }
        self.prompt_tokens = families.prompt_tokens.labels(model)
        self.looked_up, self.cached = families.looked_up.labels(model), families.cached.labels(model)
        self.completion_tokens = families.completion_tokens.labels(model)
        self.cancelled, self.active = families.cancelled.labels(model), families.active.labels(model)
        self.itl, self.duration = families.itl.labels(model), families.duration.labels(model)
        self._families, self._model, self._objectives = families, model, objectives
        self._tiers: dict[str, TierMetrics] = {}
        self.tier("")

    def tier(self, tier: str) -> TierMetrics:
        """Return the metrics of a caller's tier."""
        found = self._tiers.get(tier)
        if found is None:
            if len(self._tiers) >= MAX_TIERS and tier != OTHER_TIERS:
                return self.tier(OTHER_TIERS)
            found = TierMetrics(self._families, self._model, tier or DEFAULT_TIER, self._objectives(tier))
            self._tiers[tier] = found
        return found


class TierMetrics:
    """The gauge of a tier's waiting requests, its objectives, and how many requests met each."""

    def __init__(self, families: ModelMetricFamilies, model: str, tier: str, objectives: Sequence[Objective]) -> None:
        self.waiting = families.waiting.labels(model, tier)
        self.objectives = LatencyObjectives(**{one.metric: one.seconds for one in goodput_limits(objectives)})
        self._counters: list[tuple[Objective, list[ValueSeries]]] = []
        self.counts = bool(objectives)
        for one in objectives:
            families.slo_targets.labels(model, tier, one.name).value = one.share or 0.0
            counters = [families.slo_requests.labels(model, tier, one.name, result) for result in ("missed", "met")]
            self._counters.append((one, counters))

    def count(self, latencies: Mapping[str, float | None], outcome: GoodputOutcome) -> None:
        """Count a request that ended with `outcome` for each objective that it can meet or miss.

        Args:
            latencies: Seconds by metric, as far as they are known.
            outcome: How the request ended. One that failed or was shed has no latency, and one that
                the client aborted counts only for limits that it had missed by then.
        """
        has_failed = outcome in ("failed", "shed")
        for objective, counters in self._counters:
            if objective.metric == AVAILABILITY:
                is_met = not has_failed
            elif has_failed or (seconds := latencies[objective.metric]) is None:
                continue
            else:
                is_met = seconds <= objective.seconds
            if outcome != "aborted" or not is_met:
                counters[is_met].value += 1


class AnswerMeter:
    """The measurements of one answer, from the arrival of its request.

    Call `submitted` when the engine has the request and `end` at its end, or `refused` if it did
    not get that far.

    Attributes:
        first: Time of the first token (perf_counter), or 0.
        last: Time of the latest token, or 0.
        total: Tokens so far.
        outcome: How the answer ended; None before, and for invalid requests.
    """

    def __init__(self, metrics: ModelMetrics, started: float, tier: str = "") -> None:
        """Count the request as waiting. `started` is perf_counter() at its arrival."""
        self._metrics = metrics
        self._started = started
        self.first = self.last = 0.0
        self.total = self._prompt = 0
        self._sequences = 1
        self._ended = self._left = False
        self.outcome: GoodputOutcome | None = None
        self._tier = metrics.tier(tier)
        self._wait: ValueSeries | None = self._tier.waiting
        self._wait.value += 1

    def submitted(self, prompt_tokens: int, sequences: int) -> None:
        """Record that the engine has the request and generates this number of sequences."""
        self._prompt, self._sequences = prompt_tokens, sequences
        self._metrics.active.value += 1
        self._metrics.prompt_tokens.value += prompt_tokens

    def tokens(self, count: int) -> None:
        """Record `count` tokens that arrived in one message."""
        now = perf_counter()
        if self.last == 0.0:
            self.first = now
            self._metrics.ttft.observe(now - self._started)
            self._leave_queue()
        elif count == 1:
            self._metrics.itl.observe(now - self.last)
        elif count:
            self._metrics.itl.observe_repeated((now - self.last) / count, count)
        self.last = now
        self.total += count

    def forget(self, count: int) -> None:
        """Subtract `count` tokens that are not part of the answer after all."""
        self.total -= count

    def cancelled(self) -> None:
        """Record that the client left."""
        self._left = True
        self._metrics.cancelled.value += 1

    def refused(self, outcome: GoodputOutcome | None) -> None:
        """Record that a request ended before it was sent to the engine.

        The outcome is None for invalid requests.
        """
        self._ended = True
        self._leave_queue()
        if outcome == "aborted":
            self.cancelled()
            self._conclude()
        elif outcome is not None:
            self._conclude(outcome)

    def end(self, usage: Usage, finish: str) -> None:
        """Record the end of the answer. `finish` is the finish reason as in Outcome."""
        if self._ended:
            return
        self._ended = True
        self._leave_queue()
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
        self._conclude("failed" if finish in FAILED_FINISH_REASONS else None)

    def _conclude(self, outcome: GoodputOutcome | None = None) -> None:
        """Count the request. The objectives of its tier decide the outcome unless it is given."""
        now, tpot = perf_counter(), self.tpot
        ttft, e2e = (self.first or now) - self._started, (self.last or now) - self._started
        if outcome is None:
            outcome = self._tier.objectives.judge(ttft, tpot, e2e, left=self._left)
        self.outcome = outcome
        self._metrics.answers[outcome].value += 1
        if self._tier.counts:
            self._tier.count({"ttft": ttft, "tpot": tpot, "e2e": e2e}, outcome)

    @property
    def ttft(self) -> float | None:
        """Return the seconds from arrival to the first token, or None before it."""
        return self.first - self._started if self.first else None

    @property
    def tpot(self) -> float | None:
        """Return the seconds per token after the first, for each sequence.

        All sequences of an answer are generated side by side.
        """
        after_first = self.total / self._sequences - 1
        return (self.last - self.first) / after_first if after_first > 0 else None

    def _leave_queue(self) -> None:
        if self._wait is not None:
            self._wait.value -= 1
            self._wait = None
