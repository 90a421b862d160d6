"""The metrics of one gateway, the goodput of its answers, and the measurements of an answer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple, get_args

from prometheus_client import CollectorRegistry

from llmops.gateway.interfaces import FAILED_FINISH_REASONS, Usage
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.metric_definitions import MetricDefinition
from llmops.gateway.telemetry.metric_series import HistogramSeries, MetricFamily, ValueSeries
from llmops.objectives import AVAILABILITY, Objective, goodput_limits

#: Value of the label `priority` for callers without a tier.
DEFAULT_TIER = "default"

#: Outcomes of an answer: good, first token too late, later tokens too slow, failed by the engine or
#: the gateway, shed because too many requests wait, aborted by the client.
GoodputOutcome = Literal["good", "late", "slow", "failed", "shed", "aborted"]
GOODPUT_OUTCOMES: tuple[GoodputOutcome, ...] = get_args(GoodputOutcome)


#: A function that returns the objectives of a model and a tier.
ObjectivesOf = Callable[[str, str], Sequence[Objective]]


class LatencyObjectives(NamedTuple):
    """The maximum latencies of a good answer, in seconds. None if there is no objective.

    Attributes:
        ttft: Time to the first token.
        tpot: Time per token after the first.
        e2e: Time to the last token.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def judge(self, ttft: float, tpot: float | None, e2e: float = 0.0, *, left: bool) -> GoodputOutcome:
        """Return the outcome of an answer that did not fail.

        If a client leaves after an objective was missed, the answer counts as late or slow.

        Args:
            ttft: Seconds to the first token, or the seconds waited so far if no token has arrived.
            tpot: Seconds per token after the first, or None for fewer than two tokens.
            e2e: Seconds to the last token, or the seconds waited so far if no token has arrived.
            left: True if the client disconnected.
        """
        if self.ttft is not None and ttft > self.ttft:
            return "late"
        if self.tpot is not None and tpot is not None and tpot > self.tpot:
            return "slow"
        if self.e2e is not None and e2e > self.e2e:
            return "slow"
        return "aborted" if left else "good"


def _resident_bytes() -> float:
    """Return the resident memory in bytes, or NaN on systems without /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return math.nan


class GatewayMetrics:
    """All metrics of one gateway, in their own Prometheus registry."""

    def __init__(self, objectives: ObjectivesOf = lambda model, tier: ()) -> None:
        """Create the metrics. `objectives` returns the objectives of a model and a tier."""
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
        # register the families of models now, so that /metrics lists them before the first request
        for name in metric_definitions.MODEL_METRICS:
            (self.histogram if name.kind == "histogram" else self.numbers)(name)
        #: Returns the metrics of a served model. Pass only names of served models, because each
        #: becomes a label value.
        self.model: Callable[[str], ModelMetrics] = cache(
            lambda model: ModelMetrics(self, model, partial(objectives, model))
        )

    def numbers(self, name: MetricDefinition) -> MetricFamily[ValueSeries]:
        """Return the counter or gauge family of a definition, which the first call registers."""
        if name not in self._numbers:
            self._numbers[name] = MetricFamily(self.registry, name, ValueSeries)
        return self._numbers[name]

    def histogram(self, name: MetricDefinition) -> MetricFamily[HistogramSeries]:
        """Return the histogram family of a definition, which the first call registers."""
        if name not in self._histograms:
            self._histograms[name] = MetricFamily(self.registry, name, partial(HistogramSeries, name.buckets))
        return self._histograms[name]

    def settle(self) -> None:
        """Sort the observed values of all histograms into buckets."""
        for family in self._histograms.values():
            for one in family.series():
                one.settle()

    def reaches(self, server: str, reached: Callable[[], bool] | None) -> None:
        """Export whether a Triton server is reachable.

        Args:
            server: Address of the server.
            reached: Returns True if the server is reachable. None removes the server from the
                metric.
        """
        if reached is None:
            self._servers.forget(server)
        else:
            self._servers.labels(server).read = lambda: float(reached())


class ModelMetrics:
    """The series of one model, looked up once because a lookup takes several microseconds."""

    def __init__(self, metrics: GatewayMetrics, model: str, objectives: Callable[[str], Sequence[Objective]]) -> None:
        def number(name: MetricDefinition, *labels: str) -> ValueSeries:
            return metrics.numbers(name).labels(model, *labels)

        def histogram(name: MetricDefinition) -> HistogramSeries:
            return metrics.histogram(name).labels(model)

        self.ttft, self.tpot = histogram(metric_definitions.TTFT), histogram(metric_definitions.TPOT)
        self.itl, self.duration = histogram(metric_definitions.ITL), histogram(metric_definitions.DURATION)
        # create all outcomes at once: in Prometheus, a ratio with a missing series is no data, not
        # 0
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
        """Return the metrics of a tier."""
        found = self._tiers.get(tier)
        if found is None:
            found = TierMetrics(self._number, tier or DEFAULT_TIER, self._objectives(tier))
            self._tiers[tier] = found
        return found


class TierMetrics:
    """The metrics of one tier: its waiting requests, and the requests that met each objective."""

    def __init__(self, number: Callable[..., ValueSeries], tier: str, objectives: Sequence[Objective]) -> None:
        """Create the metrics.

        Args:
            number: Returns a series of the model by its definition and further label values.
            tier: Name of the tier.
            objectives: Objectives of the tier.
        """
        self.waiting = number(metric_definitions.QUEUE_DEPTH, tier)
        self.objectives = LatencyObjectives(**{one.metric: one.seconds for one in goodput_limits(objectives)})
        self._counters: list[tuple[Objective, list[ValueSeries]]] = []
        self.counts = bool(objectives)
        for one in objectives:
            number(metric_definitions.SLO_TARGET, tier, one.name).value = one.share or 0.0
            counters = [number(metric_definitions.SLO_REQUESTS, tier, one.name, met) for met in ("missed", "met")]
            self._counters.append((one, counters))

    def count(self, latencies: Mapping[str, float | None], outcome: GoodputOutcome) -> None:
        """Count a finished request for each objective that the request can meet or miss.

        Args:
            latencies: Seconds by metric. None if the latency is unknown.
            outcome: The outcome of the request. Requests that failed or were shed count for the
                availability alone; aborted requests count only for objectives that they have
                missed.
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

    Call `submitted` when the engine has accepted the request and `end` when the answer ends. Call
    `refused` instead if the request ends earlier.

    Attributes:
        first: Time of the first token (perf_counter), or 0.
        last: Time of the latest token, or 0.
        total: Number of tokens so far.
        outcome: The outcome of the answer; None until the end, and for invalid requests.
    """

    def __init__(self, metrics: ModelMetrics, started: float, tier: str = "") -> None:
        """Start to measure, and count the request as waiting.

        Args:
            metrics: Metrics of the request's model.
            started: Time at which the request arrived (perf_counter).
            tier: Tier of the caller, or an empty string.
        """
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
        """Record that the engine accepted the request and generates `sequences` sequences."""
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
        """Subtract `count` tokens that turned out not to belong to the answer."""
        self.total -= count

    def cancelled(self) -> None:
        """Record that the client disconnected."""
        self._left = True
        self._metrics.cancelled.value += 1

    def refused(self, outcome: GoodputOutcome | None) -> None:
        """Record that a request ended before it was sent to the engine.

        `outcome` is None for invalid requests, which count for no objective.
        """
        self._ended = True
        self._leave_queue()
        if outcome == "aborted":
            self.cancelled()
            self._conclude()
        elif outcome is not None:
            self._conclude(outcome)

    def end(self, usage: Usage, finish: str) -> None:
        """Record the end of the answer. `finish` is the finish reason; see `Outcome`."""
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
        """Count the answer. Without an `outcome`, the objectives of the tier determine it."""
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
        """Return the seconds from arrival to the first token, or None if no token has arrived."""
        return self.first - self._started if self.first else None

    @property
    def tpot(self) -> float | None:
        """Return the seconds per token after the first, or None for fewer than two tokens.

        The tokens are divided by the number of sequences, which are generated side by side.
        """
        after_first = self.total / self._sequences - 1
        return (self.last - self.first) / after_first if after_first > 0 else None

    def _leave_queue(self) -> None:
        if self._wait is not None:
            self._wait.value -= 1
            self._wait = None
