"""The metrics of one gateway worker, and the meter that follows one answer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter

from prometheus_client import CollectorRegistry

from llmops.gateway.messages import Usage
from llmops.gateway.observability import names
from llmops.gateway.observability.goodput import OUTCOMES, Objectives, Outcome
from llmops.gateway.observability.names import Name
from llmops.gateway.observability.series import Buckets, Family, Number

# tiers are made by whoever runs the gateway; were there ever more, the rest share one series
TIERS, DEFAULT_TIER, OTHER_TIERS = 16, "default", "other"
# how an answer ends that engine or gateway broke, in an Outcome's terms
BROKEN = ("engine_lost", "error")


def _resident() -> float:
    """Bytes; not a number where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return math.nan


class Metrics:
    """All metrics of one gateway worker, in a registry of their own."""

    def __init__(self, objectives: Callable[[str], Objectives] = lambda model: Objectives()) -> None:
        """`objectives` of the model of that name."""
        self.registry = CollectorRegistry()
        self._families: dict[Name, Family[Number]] = {}
        self._histograms: list[Family[Buckets]] = []
        self._objectives = objectives
        self._models: dict[str, ModelMetrics] = {}
        self.requests = self.numbers(names.REQUESTS)
        self.ignored = self.numbers(names.IGNORED)
        self.refused = self.numbers(names.REFUSED)
        self.overhead = self.histogram(names.OVERHEAD)
        self.stages = self.histogram(names.STAGES)
        self.lag = self.histogram(names.LAG).labels("main")
        self.held = self.numbers(names.HELD).labels()
        self.numbers(names.MEMORY).labels().read = _resident
        self._servers = self.numbers(names.SERVERS)
        self.of_models = ModelFamilies(self)

    def numbers(self, name: Name) -> Family[Number]:
        """The family of counters or gauges of that name; rooms that are not always there ask for theirs."""
        found = self._families.get(name)
        if found is None:
            found = self._families[name] = Family(self.registry, name, Number)
        return found

    def histogram(self, name: Name) -> Family[Buckets]:
        made = Family(self.registry, name, partial(Buckets, name.buckets))
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

    def meter(self, model: str, started: float, tier: str = "") -> Meter:
        return Meter(self.model(model), started, tier)


class ModelFamilies:
    """The families with the label `model`."""

    def __init__(self, metrics: Metrics) -> None:
        numbers, histogram = metrics.numbers, metrics.histogram
        self.ttft, self.tpot, self.waiting = histogram(names.TTFT), histogram(names.TPOT), numbers(names.QUEUE_DEPTH)
        self.answers = numbers(names.ANSWERS)
        self.prompt_tokens, self.looked_up = numbers(names.PROMPT_TOKENS), numbers(names.LOOKED_UP)
        self.cached, self.completion_tokens = numbers(names.CACHED), numbers(names.COMPLETION_TOKENS)
        self.cancelled, self.active = numbers(names.CANCELLED), numbers(names.ACTIVE)
        self.itl, self.duration = histogram(names.ITL), histogram(names.DURATION)


class ModelMetrics:
    """One model's part of them; looking up labels again and again would cost each request several microseconds."""

    def __init__(self, families: ModelFamilies, model: str, objectives: Objectives) -> None:
        self.objectives = objectives
        self.ttft, self.tpot = families.ttft.labels(model), families.tpot.labels(model)
        # all of them from the start: a ratio of series that do not exist is nothing, and not 0
        self.answers: Mapping[Outcome, Number] = {one: families.answers.labels(model, one) for one in OUTCOMES}
        self.prompt_tokens = families.prompt_tokens.labels(model)
        self.looked_up, self.cached = families.looked_up.labels(model), families.cached.labels(model)
        self.completion_tokens = families.completion_tokens.labels(model)
        self.cancelled, self.active = families.cancelled.labels(model), families.active.labels(model)
        self.itl, self.duration = families.itl.labels(model), families.duration.labels(model)
        self._model, self._waiting = model, families.waiting
        self._tiers: dict[str, Number] = {}
        self.waiting("")

    def waiting(self, tier: str) -> Number:
        """The queue of a caller's tier."""
        found = self._tiers.get(tier)
        if found is None:
            name = tier or DEFAULT_TIER
            if len(self._tiers) >= TIERS:
                return self._waiting.labels(self._model, OTHER_TIERS)
            found = self._tiers[tier] = self._waiting.labels(self._model, name)
        return found


class Meter:
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
        self.outcome: Outcome | None = None
        self._wait: Number | None = metrics.waiting(tier)
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
            self._metrics.itl.observe_each((now - self.last) / count, count)
        self.last = now
        self.total += count

    def forget(self, count: int) -> None:
        """So many of them are no part of the answer."""
        self.total -= count

    def cancelled(self) -> None:
        """The client left."""
        self._left = True
        self._metrics.cancelled.value += 1

    def refused(self, outcome: Outcome | None) -> None:
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
        self.outcome = "failed" if finish in BROKEN else self._judged(tpot)
        metrics.answers[self.outcome].value += 1

    def _judged(self, tpot: float | None) -> Outcome:
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
