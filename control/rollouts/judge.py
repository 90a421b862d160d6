"""The judge of a canary, which decides whether a new version may get more requests.

The judge compares outcomes of requests. It has neither input nor output, and callers pass the
clock, so that control, the simulator and tests run the same code. A roll-out has one judge for all
of its steps:

    judge = CanaryJudge(JudgeSettings(stable="v1", canary="v2"), time.monotonic)
    judge.observe(RequestOutcome(version="v2", ok=True, ttft_s=0.2, …))     # for each version
    judge.verdict()          # "continue", "promote" (to the next step) or "rollback" (final)
    judge.begin_step()       # after the weights have changed

Each criterion is a sequential test (`sequential.py`). The tests share FALSE_ROLLBACK, so that
together they stop a healthy version with at most this probability, however often the verdict is
read.

- Errors, refusals and similar events: if both versions fail alike, the probability that a failure
  is the canary's equals the canary's share of the requests. An incident that affects the stable
  version too is therefore not evidence.
- Latencies: if the canary is healthy, a request exceeds 1.25 × the stable version's 95th percentile
  with a probability of at most 0.05. Every latency is divided by the level of the requests around
  it, so that changes of the load are not evidence either.

A canary with 5 % of the requests has a cold prefix cache. If a baseline twin runs, which gets as
many requests, the canary's times are compared with the twin's. Otherwise, the TTFT is compared only
with requests of the stable version that had a similar number of uncached tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist, fmean, stdev
from typing import Literal

from llmops.control.rollouts.sequential import BettingTest, NoWorseTest
from llmops.quantile_window import QuantileWindow

Decision = Literal["continue", "promote", "rollback"]
RowState = Literal["ok", "unclear", "worse", "no data", "shown"]

#: Number of the stable version's latest outcomes that are compared. Enough for a 99th percentile,
#: and few enough to compare with the current load instead of the load an hour ago.
WINDOW = 4000

#: Minimum number of the stable version's outcomes for a comparison, because the share or quantile
#: of fewer outcomes is unreliable.
MIN_STABLE = 50

#: Maximum seconds that count between two readings of the clock: a clock that jumps, or a paused
#: process, does not make a step older.
MAX_GAP = 60.0

#: Difference between the shares of failed requests up to which a roll-out continues, however
#: certain the difference is.
TOLERATED_SHARE = 0.005

#: Share of the stable version's requests with a bad event above which the same event in the
#: canary's requests is not evidence, because nearly every request has it.
MAX_SHARE = 0.9

#: Weight of the newest request in the level of a latency. The level covers about the last 8
#: requests, so that it follows the load.
LEVEL_SMOOTHING = 1 / 8

#: Number of the stable version's requests that must follow a canary's request before the canary's
#: request is compared. The level before and after the request is then known, so that a load that
#: rises within seconds is not evidence.
LEVEL_DELAY = 16

#: Weight of the newest request in the share of the stable version's recent bad events, which covers
#: about the last 16 requests.
RECENT_SMOOTHING = 1 / 16

#: Increase of the share of the stable version's recent bad events that makes an incident. Failures
#: during an incident are not compared.
INCIDENT_SHARE = 0.05

#: Factor by which the median output length may change in either direction.
LENGTH_TOLERANCE = 1.5

#: Minimum number of prompts for which a comparison of scores can stop a roll-out, because the mean
#: of fewer scores is unreliable.
MIN_GOLDEN = 20

#: Loss of the mean score on golden prompts, relative to the stable version's score, from which a
#: canary is not promoted even if the loss may be chance.
HOLDING_LOSS = 0.05

#: Maximum ratio of the canary's latency to the stable version's.
LATENCY_TOLERANCE = 1.25

#: Maximum probability that a healthy canary is rolled back.
FALSE_ROLLBACK = 0.01

#: Parts of FALSE_ROLLBACK for errors and for golden prompts. The other criteria share the rest.
ERRORS_PART, GOLDEN_PART = 0.4, 0.3

#: Increase of the share of late requests. A canary is promoted only if its outcomes exclude an
#: increase by this much.
QUANTILE_MARGIN = 0.1

#: Quantiles of latencies that are compared. The flag is True if a promotion requires that the
#: quantile is not worse; for the 99th percentile, a proof would take thousands of requests.
_QUANTILES = ((0.5, True), (0.95, True), (0.99, False))


@dataclass(frozen=True)
class RequestOutcome:
    """The outcome of one request, or of a sweep of golden prompts.

    Attributes:
        version: Name of the version that answered, or the label of the baseline twin.
        ok: False if the engine, Triton or the gateway failed. Errors of clients are not failures.
        ttft_s: Seconds to the first token, or None if no token arrived.
        tpot_s: Mean seconds per token after the first, or None for answers of a few tokens.
        prompt_tokens: Number of prompt tokens.
        uncached_tokens: Number of prompt tokens outside the prefix cache, or None if unknown.
        output_tokens: Number of tokens in the answer.
        finish_reason: Reason why the answer ended, such as "stop" or "length".
        refused: True if the answer is a refusal, or was cut by a safety filter.
        script_mismatch: True if the answer is in another script than the prompt.
        garbled: True if the answer does not look like text or code.
        good: True if the answer was complete and met its objectives; None without objectives.
        golden: Scores of a sweep by golden prompt, from 0 to 1 or mean log-probabilities. If set,
            the outcome is of a sweep, and `version` is the only other field that is used. None for
            a request.
    """

    version: str
    ok: bool
    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: int = 0
    uncached_tokens: int | None = None
    output_tokens: int = 0
    finish_reason: str | None = "stop"
    refused: bool = False
    script_mismatch: bool = False
    garbled: bool = False
    good: bool | None = None
    golden: Mapping[str, float] | None = None


@dataclass(frozen=True)
class JudgeSettings:
    """The versions to compare, and the requirements of a promotion.

    Attributes:
        stable: Name of the version that serves now.
        canary: Name of the version that is judged.
        twin: Label of the baseline twin's outcomes, or None if no twin runs.
        min_requests: Minimum number of the canary's requests in a step before a promotion.
        min_seconds: Minimum duration of a step in seconds before a promotion.
        quality_tolerance: Mean score that the canary may lose on golden prompts, as calibrated from
            a pair of versions that is known to be healthy.
    """

    stable: str
    canary: str
    twin: str | None = None
    min_requests: int = 300
    min_seconds: float = 60.0
    quality_tolerance: float = 0.0


@dataclass(frozen=True)
class JudgeRow:
    """The row of a criterion in the table of `llmops rollout status`.

    Attributes:
        metric: Name of the criterion.
        unit: "%", "ms", "tokens" or "".
        stable: Value of the stable version or its twin, or None if unknown.
        canary: Value of the canary, or None if unknown.
        state: "worse" stops the roll-out, "unclear" and "no data" hold the roll-out, and "shown" is
            not judged.
        note: Remark on the comparison and on missing data.
    """

    metric: str
    unit: str
    stable: float | None
    canary: float | None
    state: RowState
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The judge's decision, its reason, and the table of all criteria."""

    decision: Decision
    reason: str
    rows: Sequence[JudgeRow]


class CanaryJudge:
    """A judge that compares the outcomes of a canary with the stable version's outcomes.

    Args:
        settings: The versions to compare, and the requirements of a promotion.
        clock: Returns the time in seconds.
    """

    def __init__(self, settings: JudgeSettings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self._clock, self._read_at, self._elapsed = clock, clock(), 0.0
        self._requests = 0
        self._rollback: str | None = None
        twin = settings.twin is not None
        errors = FALSE_ROLLBACK * ERRORS_PART
        tests = len(_RATES) - 1 + len(_QUANTILES) * 2 + 2
        rest = FALSE_ROLLBACK * (1 - ERRORS_PART - GOLDEN_PART) / tests
        self._rates = [
            # judge the goodput only with a twin, because a cold cache alone reduces the goodput
            _RateCriterion(rate, errors if rate.name == "errors" else rest, rate.name != "goodput" or twin)
            for rate in _RATES
        ]
        latency = partial(
            _ValueCriterion,
            unit="ms",
            tolerance=LATENCY_TOLERANCE,
            quantiles=_QUANTILES,
            alpha=rest,
            follows_load=True,
        )
        length = partial(
            _ValueCriterion,
            "answer length",
            unit="tokens",
            tolerance=LENGTH_TOLERANCE,
            quantiles=_QUANTILES[:1],
            alpha=rest,
        )
        self._ttft = latency("TTFT", note="the twin" if twin else "with as many uncached tokens")
        self._tpot = latency("TPOT", note="the twin" if twin else "")
        self._longer, self._shorter = length(note="longer"), length(note="shorter", show=_inverse)
        self._golden = _GoldenCriterion(settings.quality_tolerance, FALSE_ROLLBACK * GOLDEN_PART)

    def observe(self, outcome: RequestOutcome) -> None:
        """Count a finished request. Outcomes of unknown versions are ignored."""
        self._advance()
        settings = self.settings
        canary = outcome.version == settings.canary
        if not canary and outcome.version not in (settings.stable, settings.twin):
            return
        if outcome.golden is not None:
            self._golden.observe(outcome.golden, canary)
            return
        self._requests += canary
        is_compared = canary or settings.twin in (None, outcome.version)
        for rate in self._rates:
            if rate.name != "goodput" or (is_compared and outcome.good is not None):
                rate.observe(outcome, canary)
        if not outcome.ok:
            return
        if outcome.output_tokens:
            self._longer.observe(float(outcome.output_tokens), canary)
            self._shorter.observe(1 / outcome.output_tokens, canary)
        size_class = _size_class(outcome) if settings.twin is None else 0
        latencies = ((self._ttft, outcome.ttft_s, size_class), (self._tpot, outcome.tpot_s, 0))
        for criterion, value, value_class in latencies:
            if value is not None and value > 0:
                if not canary:
                    criterion.follow(1000 * value)
                if is_compared:
                    criterion.observe(1000 * value, canary, value_class)

    def begin_step(self) -> None:
        """Begin to check the requirements again, after the canary's weight has changed."""
        self._advance()
        self._requests, self._elapsed = 0, 0.0
        for criterion in self._criteria():
            criterion.restart_ok()

    def decide(self) -> tuple[Decision, str]:
        """Return the decision and its reason."""
        self._advance()
        if self._rollback is None:
            self._rollback = next((found for criterion in self._criteria() if (found := criterion.breach())), None)
        if self._rollback is not None:
            return "rollback", self._rollback
        settings = self.settings
        if self._requests < settings.min_requests:
            return "continue", f"{self._requests} of {settings.min_requests} requests of this step have ended."
        needed = [(criterion.name, criterion.requirements()) for criterion in self._criteria()]
        if missing := [name for name, states in needed if "no data" in states.values()]:
            return "continue", f"No comparable requests of {settings.stable} yet for: {', '.join(missing)}."
        if self._elapsed < settings.min_seconds:
            return "continue", f"This step has run for {self._elapsed:.0f} of {settings.min_seconds:.0f} s."
        if unclear := [label for _, states in needed for label, state in states.items() if state == "unclear"]:
            return (
                "continue",
                f"The canary is not yet shown to be as good as {settings.stable} in: {', '.join(unclear)}.",
            )
        return "promote", f"{settings.canary} is as good as {settings.stable} after {self._requests} requests."

    def verdict(self) -> Verdict:
        """Return the decision with the table of all criteria."""
        decision, reason = self.decide()
        requests = JudgeRow("requests of this step", "", None, self._requests, "shown")
        return Verdict(decision, reason, [requests, *(row for found in self._criteria() for row in found.rows())])

    def _criteria(self) -> Sequence[_Criterion]:
        return (*self._rates, self._ttft, self._tpot, self._longer, self._shorter, self._golden)

    def _advance(self) -> None:
        now = self._clock()
        self._elapsed += min(max(now - self._read_at, 0.0), MAX_GAP)
        self._read_at = now


@dataclass(frozen=True)
class _Rate:
    """An event that should happen in a small share of the requests.

    Attributes:
        name: Name of the criterion.
        event: Description of the event for reasons, such as "were refusals".
        bad: Returns True if the event happened in a request.
        margin: Increase of the share that a promotion must exclude.
        of_answers: True if requests that failed are not counted.
    """

    name: str
    event: str
    bad: Callable[[RequestOutcome], bool]
    margin: float
    of_answers: bool = True


_RATES = (
    _Rate("errors", "failed", lambda outcome: not outcome.ok, 0.02, of_answers=False),
    _Rate("goodput", "missed their objectives", lambda outcome: not outcome.good, 0.1, of_answers=False),
    _Rate("refusals", "were refusals", lambda outcome: outcome.refused, 0.05),
    _Rate("other script", "were in another script", lambda outcome: outcome.script_mismatch, 0.05),
    _Rate("garbled", "were not text", lambda outcome: outcome.garbled, 0.05),
    _Rate("cut", "were cut at max_tokens", lambda outcome: outcome.finish_reason == "length", 0.1),
)


class _Criterion(ABC):
    """A criterion of the judge, with one or more tests and the table's rows for them."""

    name: str

    @abstractmethod
    def breach(self) -> str | None:
        """Return the reason why the canary must be rolled back, or None."""

    @abstractmethod
    def rows(self) -> Sequence[JudgeRow]:
        """Return the rows of the table."""

    @abstractmethod
    def requirements(self) -> Mapping[str, RowState]:
        """Return the state of each test that must be `ok` before a promotion, by its row's label.

        The result is empty if the canary has had no requests.
        """

    @abstractmethod
    def restart_ok(self) -> None:
        """Begin to check the requirements of a promotion again."""


class _RateCriterion(_Criterion):
    """The criterion that a bad event is not more frequent in the canary's requests."""

    def __init__(self, rate: _Rate, alpha: float, judged: bool) -> None:
        self.rate, self.name, self._judged = rate, rate.name, judged
        self._test = BettingTest(alpha)
        self._stable: deque[bool] = deque(maxlen=WINDOW)
        self._canary: deque[bool] = deque(maxlen=WINDOW)
        self._stable_events = 0
        # share of bad events in the stable version's recent requests, which shows an incident at
        # once
        self._recent = 0.0
        self.restart_ok()

    def restart_ok(self) -> None:
        self._no_worse = NoWorseTest(self.rate.margin)
        # requests since the weights changed: of the stable version, of the canary
        self._counts = [1, 1]

    def observe(self, outcome: RequestOutcome, canary: bool) -> None:
        """Count a request, unless the request failed and the event concerns answers only."""
        if self.rate.of_answers and not outcome.ok:
            return
        event = self.rate.bad(outcome)
        if len(self._stable) >= MIN_STABLE:
            # add one to the events seen: few requests do not prove that a fault never happens
            share = (self._stable_events + 1) / (len(self._stable) + 2)
            if event and self._recent < share + INCIDENT_SHARE:
                self._test.observe(canary, self._counts[True] / sum(self._counts))
            if canary:
                self._no_worse.observe(event, max(share, min(self._recent, MAX_SHARE)))
        self._counts[canary] += 1
        if not canary:
            self._stable_events += event - (len(self._stable) == WINDOW and self._stable[0])
            self._recent += RECENT_SMOOTHING * (event - self._recent)
        (self._canary if canary else self._stable).append(event)

    def breach(self) -> str | None:
        if not (self._judged and self._test.is_worse):
            return None
        canary, stable = fmean(self._canary), fmean(self._stable)
        if canary - stable < TOLERATED_SHARE:
            return None
        return (
            f"{self.name}: {canary:.1%} of {len(self._canary)} requests of the canary {self.rate.event},"
            f" of the stable version {stable:.1%} of {len(self._stable)}."
        )

    def rows(self) -> Sequence[JudgeRow]:
        stable, canary = (fmean(some) * 100 if some else None for some in (self._stable, self._canary))
        if self.name == "goodput":
            stable, canary = (None if share is None else 100 - share for share in (stable, canary))
        return [JudgeRow(self.name, "%", stable, canary, self._state() if self._judged else "shown")]

    def requirements(self) -> Mapping[str, RowState]:
        return {self.name: self._state()} if self._judged and self._canary else {}

    def _state(self) -> RowState:
        # if nearly every request has the event, an increase by the margin is impossible
        is_certain = self._stable_events > (1 - self.rate.margin) * len(self._stable)
        return _state(self.breach() is not None, self._no_worse, self._no_worse.is_ok or is_certain)


class _ValueCriterion(_Criterion):
    """The criterion that quantiles of a value are not larger for the canary."""

    def __init__(
        self,
        name: str,
        unit: str,
        tolerance: float,
        quantiles: Sequence[tuple[float, bool]],
        alpha: float,
        note: str,
        show: Callable[[float], float] = lambda value: value,
        follows_load: bool = False,
    ) -> None:
        self.name, self._unit, self._tolerance, self._note, self._show = name, unit, tolerance, note, show
        self._tests = {share: BettingTest(alpha) for share, _ in quantiles}
        self._required = [share for share, required in quantiles if required]
        self._stable: dict[int, QuantileWindow] = defaultdict(lambda: QuantileWindow(WINDOW))
        self._canary = QuantileWindow(WINDOW)
        self._classes: Counter[int] = Counter()
        # logarithm of the moving mean of the stable version's values, by which values are divided
        self._level = 0.0
        # number of requests that the level has followed, and the canary's requests that wait until
        # the level has followed LEVEL_DELAY more
        self._follows_load, self._followed = follows_load, 0
        self._waiting: deque[tuple[int, float, int, float]] = deque()
        self.restart_ok()

    def restart_ok(self) -> None:
        self._no_worse = {share: NoWorseTest(QUANTILE_MARGIN) for share in self._tests}

    def follow(self, value: float) -> None:
        """Update the level with the latency of a request to the stable version or its twin.

        The level is the moving geometric mean of these latencies, by which values are divided.
        """
        self._level += (LEVEL_SMOOTHING if self._followed else 1.0) * (math.log(value) - self._level)
        self._followed += 1
        while self._waiting and self._waiting[0][0] <= self._followed:
            _, waiting, size_class, level = self._waiting.popleft()
            self._compare(waiting / math.exp(max(level, self._level)), size_class)

    def observe(self, value: float, canary: bool, size_class: int = 0) -> None:
        """Count the value of a request to the canary or to the stable version.

        A value of the canary is compared with the stable version's values of the same class.
        """
        if not canary:
            self._stable[size_class].add(value / math.exp(self._level))
        elif self._follows_load:
            self._waiting.append((self._followed + LEVEL_DELAY, value, size_class, self._level))
        else:
            self._compare(value, size_class)

    def _compare(self, relative: float, size_class: int) -> None:
        self._canary.add(relative)
        self._classes[size_class] += 1
        if len(window := self._stable[size_class]) >= MIN_STABLE:
            for share, test in self._tests.items():
                if (bound := window.upper_bound(share)) is not None:
                    late = relative > bound * self._tolerance
                    test.observe(late, 1 - share)
                    self._no_worse[share].observe(late, 1 - share)

    def breach(self) -> str | None:
        for share, test in self._tests.items():
            if test.is_worse:
                note = f" ({self._note})" if self._note else ""
                stable, canary = (f"{value:.0f} {self._unit}" for value in self._values(share) if value is not None)
                return (
                    f"{self._label(share)}: {canary} in {len(self._canary)} requests of the canary,"
                    f" of the stable version {stable}{note}."
                )
        return None

    def rows(self) -> Sequence[JudgeRow]:
        return [
            JudgeRow(self._label(share), self._unit, *self._values(share), self._state(share), self._note)
            for share in self._tests
        ]

    def requirements(self) -> Mapping[str, RowState]:
        has_canary = len(self._canary) or self._waiting
        return {self._label(share): self._state(share) for share in self._required} if has_canary else {}

    def _state(self, share: float) -> RowState:
        no_worse = self._no_worse[share]
        return _state(self._tests[share].is_worse, no_worse, no_worse.is_ok)

    def _label(self, share: float) -> str:
        return f"{self.name} p{share * 100:.0f}"

    def _values(self, share: float) -> tuple[float | None, float | None]:
        """Return the quantile `share` of the stable version's values, and of the canary's.

        Both are in the unit of the table, and None without values.
        """
        level = math.exp(self._level)
        stable, canary = self._expected(share), self._canary.quantile(share)
        return (
            None if stable is None else self._show(stable * level),
            None if canary is None else self._show(canary * level),
        )

    def _expected(self, share: float) -> float | None:
        """Return the quantile `share` of the stable version's values, divided by the level.

        Each class of requests has the weight that the class has among the canary's requests. The
        result is None if no class has values of both versions.
        """
        weighted = sorted(
            (value, self._classes[size_class] / len(window))
            for size_class, window in self._stable.items()
            if self._classes[size_class]
            for value in window
        )
        left = share * sum(weight for _, weight in weighted)
        for value, weight in weighted:
            left -= weight
            if left <= 0:
                return value
        return None


class _GoldenCriterion(_Criterion):
    """The criterion that the canary's scores on golden prompts are not lower.

    Answers are greedy, so a second sweep adds little evidence. The probability of a false alarm is
    therefore halved with each sweep.
    """

    name = "golden prompts"

    def __init__(self, tolerance: float, alpha: float) -> None:
        self._tolerance, self._alpha = tolerance, alpha
        # latest sweep of the stable version and of the canary, until the two are compared
        self._scores: list[Mapping[str, float]] = [{}, {}]
        self._means: tuple[float, float] | None = None
        self._breach: str | None = None
        self._prompts = 0

    def observe(self, scores: Mapping[str, float], canary: bool) -> None:
        """Store the scores of a sweep. Compare two sweeps that have prompts in common."""
        self._scores[canary] = scores
        stable, own = self._scores
        pairs = [(score, own[name]) for name, score in stable.items() if name in own]
        if not pairs:
            return
        self._scores = [{}, {}]
        if len(pairs) < MIN_GOLDEN:
            return
        before, after = map(fmean, zip(*pairs, strict=True))
        losses = [one - other for one, other in pairs]
        self._prompts, self._means = len(pairs), (before, after)
        self._alpha /= 2
        # assume at least the deviation of a single difference of 1: equal losses have no deviation,
        # and would count as certain
        error = max(stdev(losses), len(losses) ** -0.5) / math.sqrt(len(losses))
        if (fmean(losses) - self._tolerance) / error > NormalDist().inv_cdf(1 - self._alpha):
            self._breach = self._breach or (
                f"golden prompts: the mean score of {len(losses)} prompts is {after:.3f},"
                f" of the stable version {before:.3f} (tolerated loss: {self._tolerance:.3f})."
            )

    def breach(self) -> str | None:
        return self._breach

    def restart_ok(self) -> None:
        """Keep all scores, because earlier sweeps are as good evidence as later sweeps."""

    def requirements(self) -> Mapping[str, RowState]:
        return {self.name: self._state()}

    def rows(self) -> Sequence[JudgeRow]:
        before, after = self._means or (None, None)
        return [JudgeRow(self.name, "", before, after, self._state(), f"{self._prompts} prompts")]

    def _state(self) -> RowState:
        if self._means is None:
            return "shown"
        if self._breach:
            return "worse"
        before, after = self._means
        return "unclear" if before - after - self._tolerance > HOLDING_LOSS * abs(before) else "ok"


def _size_class(outcome: RequestOutcome) -> int:
    """Return the number of the request's class by its uncached prompt tokens.

    The tokens of two requests in a class differ by about a quarter at most.
    """
    uncached = outcome.prompt_tokens if outcome.uncached_tokens is None else outcome.uncached_tokens
    # the latency of short prompts hardly depends on their length
    return round(3 * math.log2(max(uncached, 0) + 32))


def _state(is_worse: bool, test: NoWorseTest, is_ok: bool) -> RowState:
    return "worse" if is_worse else "no data" if not test.count else "ok" if is_ok else "unclear"


def _inverse(value: float) -> float:
    return 1 / value
