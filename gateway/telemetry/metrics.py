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
        self._numbers: dict[MetricDefinition, MetricFamily[ValueSeries]] = {}
        self._histograms: dict[MetricDefinition, MetricFamily[HistogramSeries]] = {}
        self.requests = self.numbers(metric_definitions.REQUESTS)
        self.ignored = self.numbers(metric_definitions.IGNORED_FIELDS)
        self.refused = self.numbers(metric_definitions.REFUSED_CONNECTIONS)
        self.overhead = self.histogram(metric_definitions.OVERHEAD)
        self.stages = self.histogram(metric_definitions.STAGES)
        self.lag = self.histogram(metric_definitions.EVENT_LOOP_LAG).labels("main")
        self.held = self.numbers(metric_definitions.EVENT_LOOP_BLOCKED).labels()
        self.numbers(metric_definitions.MEMORY).labels().read = _resident_bytes
        self._servers = self.numbers(metric_definitions.SERVER_REACHABLE)
        # /metrics names the metrics of models before there is a model
        for name in metric_definitions.MODEL_METRICS:
            (self.histogram if name.kind == "histogram" else self.numbers)(name)
        #: Returns the metrics of a served model. Each name that is passed becomes a label value.
        self.model: Callable[[str], ModelMetrics] = cache(
            lambda model: ModelMetrics(self, model, partial(objectives, model))
        )

    def numbers(self, name: MetricDefinition) -> MetricFamily[ValueSeries]:
        """Return the counters or gauges of a definition. The first call registers them."""
        if name not in self._numbers:
            self._numbers[name] = MetricFamily(self.registry, name, ValueSeries)
        return self._numbers[name]

    def histogram(self, name: MetricDefinition) -> MetricFamily[HistogramSeries]:
        """Return the histograms of a definition. The first call registers them."""
        if name not in self._histograms:
            self._histograms[name] = MetricFamily(self.registry, name, partial(HistogramSeries, name.buckets))
        return self._histograms[name]

    def settle(self) -> None:
        """Sort the observed values of all histograms into buckets."""
        for family in self._histograms.values():
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


class ModelMetrics:
    """The series of one model.

    Looking up labels for each request would cost several microseconds.
    """

    def __init__(self, metrics: GatewayMetrics, model: str, objectives: Callable[[str], Sequence[Objective]]) -> None:
        def number(name: MetricDefinition, *labels: str) -> ValueSeries:
            return metrics.numbers(name).labels(model, *labels)

        def histogram(name: MetricDefinition) -> HistogramSeries:
            return metrics.histogram(name).labels(model)

        self.ttft, self.tpot = histogram(metric_definitions.TTFT), histogram(metric_definitions.TPOT)
        self.itl, self.duration = histogram(metric_definitions.ITL), histogram(metric_definitions.DURATION)
        # all outcomes from the start: a ratio of missing series is no data and not 0
        self.answers = {one: number(metric_definitions.ANSWERS, one) for one in GOODPUT_OUTCOMES}
        self.prompt_tokens = number(metric_definitions.PROMPT_TOKENS)
        self.looked_up = number(metric_definitions.PREFIX_LOOKUP_TOKENS)
        self.cached = number(metric_definitions.PREFIX_CACHED_TOKENS)
        self.completion_tokens = number(metric_definitions.COMPLETION_TOKENS)
        self.cancelled = number(metric_definitions.CANCELLED_REQUESTS)
        self.active = number(metric_definitions.ACTIVE_STREAMS)
        self._number, self._objectives = number, objectives
        self._tiers: dict[str, TierMetrics] = {}
        self.tier("")

    def tier(self, tier: str) -> TierMetrics:
        """Return the metrics of a caller's tier."""
        found = self._tiers.get(tier)
        if found is None:
            if len(self._tiers) >= MAX_TIERS and tier != OTHER_TIERS:
                return self.tier(OTHER_TIERS)
            found = TierMetrics(self._number, tier or DEFAULT_TIER, self._objectives(tier))
            self._tiers[tier] = found
        return found


class TierMetrics:
    """The gauge of a tier's waiting requests, its objectives, and how many requests met each."""

    def __init__(self, number: Callable[..., ValueSeries], tier: str, objectives: Sequence[Objective]) -> None:
        """Create the metrics. `number` returns a series of the model by definition and further labels."""
        self.waiting = number(metric_definitions.QUEUE_DEPTH, tier)
        self.objectives = LatencyObjectives(**{one.metric: one.seconds for one in goodput_limits(objectives)})
        self._counters: list[tuple[Objective, list[ValueSeries]]] = []
        self.counts = bool(objectives)
        for one in objectives:
            number(metric_definitions.SLO_TARGET, tier, one.name).value = one.share or 0.0
            counters = [number(metric_definitions.SLO_REQUESTS, tier, one.name, met) for met in ("missed", "met")]
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
