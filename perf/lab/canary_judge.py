"""The canary judge on simulated roll-outs: false rollbacks, promotions, and detected faults.

The simulated service is difficult to judge: its load changes by a factor of two within minutes, a
canary starts with a cold prefix cache, latencies have long tails, and some errors and rejections
come in clusters that affect every version. The judge is the same code that control runs.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmops.control.rollouts.judge import CanaryJudge, Decision, JudgeSettings, RequestOutcome
from llmops.perf.lab.figures import Section

ROLLOUTS = 1000
#: Share of the requests that the canary gets in each step.
STEPS = (0.05, 0.25, 0.5)
#: Requests per second of all versions together.
RATE = 20.0
#: Goal: the number of the canary's requests in a step within which a healthy version is promoted.
PROMOTED_WITHIN = 800
#: Goal: the number of the canary's requests within which a fault is found.
CAUGHT_WITHIN = 200
FAULTS = ("slow", "errors", "scrambled", "language")
#: Number of prompts of the golden set, with which a loss of LOSS is to be found.
PROMPTS = 1000
#: Goal: the smallest loss of accuracy, as a share of the answers, that the judge finds with PROMPTS
#: golden prompts.
LOSS = 0.03
CONDITIONS = f"{ROLLOUTS} simulated roll-outs of {len(STEPS)} steps."


@dataclass(frozen=True)
class SimulatedRollout:
    """The result of a simulated roll-out.

    Attributes:
        decision: The judge's last decision.
        reason: The reason of the decision.
        requests: Number of the canary's requests in each step.
    """

    decision: Decision
    reason: str
    requests: Sequence[int]


class Service:
    """A simulated service with a stable version and a canary.

    Args:
        seed: Seed of the random numbers, which also determine how noisy the service is.
        fault: The canary's fault: slow (2 × TPOT), errors (5 %), scrambled, language, or None.
        twin: True if a second copy of the stable version gets as many requests as the canary.
    """

    def __init__(self, seed: int, fault: str | None = None, twin: bool = False) -> None:
        self._random = random.Random(seed)
        self._fault, self._twin = fault, twin
        draw = self._random.uniform
        # The objective of the service is an availability of 99.9 %.
        self._errors, self._refusals, self._cut = draw(0, 0.001), draw(0, 0.1), draw(0, 0.5)
        self._spread, self._hit_rate, self._system = draw(0.2, 0.6), draw(0.2, 0.9), draw(100, 2000)
        self._load, self._incident = 0.0, 0.0
        self._seen = Counter[str]()
        self.now = 0.0

    def request(self, share: float) -> RequestOutcome:
        """Return the outcome of the next request, of which the canary gets the share `share`."""
        draw, gauss = self._random.random, self._random.gauss
        self.now += self._random.expovariate(RATE)
        # The load changes slowly, over about 1,000 requests. A cluster of errors that affects all
        # versions begins every 20,000 requests on average.
        self._load = 0.999 * self._load + gauss(0, 0.0447 * 0.35)
        self._incident = self._incident - 1 if self._incident > 0 else 100 if draw() < 1 / 20_000 else 0
        at = draw()
        version = "canary" if at < share else "twin" if self._twin and at < 2 * share else "stable"
        self._seen[version] += 1
        fault = self._fault if version == "canary" else None
        ok = draw() >= (0.05 if fault == "errors" else 0.3 if self._incident else self._errors)
        # The cache of a version without earlier requests has few of the prompts.
        warm = 1.0 if version == "stable" else 1 - math.exp(-self._seen[version] / 400)
        prompt = self._system + self._random.lognormvariate(6, 1)
        uncached = prompt - (self._system if draw() < self._hit_rate * warm else 0)
        load = math.exp(self._load)
        output = max(1, int(self._random.lognormvariate(5, 0.8)))
        garbled = 0.8 if fault == "scrambled" else 0.01
        return RequestOutcome(
            version=version,
            ok=ok,
            ttft_s=load * (0.03 + uncached / 8000) * self._random.lognormvariate(0, self._spread),
            tpot_s=load * (0.06 if fault == "slow" else 0.03) * self._random.lognormvariate(0, self._spread / 2),
            prompt_tokens=int(prompt),
            uncached_tokens=int(uncached),
            output_tokens=output,
            finish_reason="length" if draw() < (0.8 if fault == "scrambled" else self._cut) else "stop",
            refused=draw() < self._refusals,
            script_mismatch=draw() < (0.9 if fault == "language" else 0.01),
            garbled=draw() < garbled,
        )


def simulate(
    seed: int, fault: str | None = None, twin: bool = False, steps: Sequence[float] = STEPS, limit: int = 2000
) -> SimulatedRollout:
    """Return the result of a roll-out with a verdict after every request of the canary.

    Args:
        seed: Seed of the service.
        fault: The canary's fault, or None.
        twin: True if a second copy of the stable version gets as many requests as the canary.
        steps: The canary's share of the requests in each step.
        limit: Number of the canary's requests in one step after which the simulation ends
            undecided.
    """
    service = Service(seed, fault, twin)
    settings = JudgeSettings(stable="stable", canary="canary", twin="twin" if twin else None)
    judge = CanaryJudge(settings, lambda: service.now)
    counts: list[int] = []
    for share in steps:
        judge.begin_step()
        counts.append(0)
        while True:
            outcome = service.request(share)
            judge.observe(outcome)
            if outcome.version != "canary":
                continue
            counts[-1] += 1
            decision, reason = judge.decide()
            if decision == "rollback" or counts[-1] == limit:
                return SimulatedRollout(decision, reason, counts)
            if decision == "promote":
                break
    return SimulatedRollout("promote", reason, counts)


def golden_sweep(seed: int, loss: float, prompts: int = PROMPTS) -> tuple[list[bool], list[bool], list[float]]:
    """Return which golden prompts two versions answer correctly, and the change of log-probability.

    The versions' certainties of an answer differ by noise, as those of two quantisations do:
    between versions of the same accuracy, 4 % of the answers change (Dutta et al., "Accuracy is not
    all you need", 2024, find 2 to 13 %).

    Args:
        seed: Seed of the random numbers.
        loss: Accuracy that the second version loses. The accuracy of the first version is 0.7.
        prompts: Number of prompts.
    """
    draw = random.Random(seed).gauss
    # The density of the certainties at 0 is 0.35, so a shift of loss / 0.348 takes the share `loss`
    # of the answers from correct to wrong.
    shift = loss / 0.348
    before = [draw(0.524, 1) for _ in range(prompts)]
    changes = [draw(-shift, 0.15) for _ in range(prompts)]
    after = [certainty + change for certainty, change in zip(before, changes, strict=True)]
    return [value > 0 for value in before], [value > 0 for value in after], changes


def golden_verdict(seed: int, loss: float, by_probability: bool) -> Decision:
    """Return the judge's decision after one sweep of the golden prompts.

    `golden_sweep` describes `seed` and `loss`. With `by_probability`, the judge compares
    log-probabilities of answers instead of correct answers.
    """
    judge = CanaryJudge(JudgeSettings(stable="stable", canary="canary"), lambda: 0.0)
    before, after, changes = golden_sweep(seed, loss)
    stable, canary = ([0.0] * len(changes), changes) if by_probability else (before, after)
    for version, scores in (("stable", stable), ("canary", canary)):
        golden = {str(prompt): float(score) for prompt, score in enumerate(scores)}
        judge.observe(RequestOutcome(version, ok=True, golden=golden))
    return judge.decide()[0]


def measure(engine: Path, section: Section) -> None:
    """Add all figures of this benchmark to `section`. `engine` is not used."""
    for twin in (False, True):
        name = "with a twin" if twin else "without a twin"
        runs = [simulate(seed, None, twin) for seed in range(ROLLOUTS)]
        _healthy(section, name, runs)
        for fault in FAULTS:
            ends = [simulate(seed, fault, twin, STEPS[:1], CAUGHT_WITHIN) for seed in range(ROLLOUTS)]
            caught = [end for end in ends if end.decision == "rollback"]
            section.add(f"{name}: {fault} caught in {CAUGHT_WITHIN} requests", _percent(caught, ends), "%", 99, "least")
    for by_probability in (False, True):
        name = f"{PROMPTS} {'log-probabilities' if by_probability else 'right answers'}"
        lost, equal = (_found(loss, by_probability) for loss in (LOSS, 0.0))
        section.add(f"{name}: a loss of {100 * LOSS:g} points is found", lost, "%", 90, "least")
        section.add(f"{name}: no loss, but rolled back", equal, "%", 1)


def _healthy(section: Section, name: str, runs: Sequence[SimulatedRollout]) -> None:
    rolled_back = [run for run in runs if run.decision == "rollback"]
    for run in rolled_back[:5]:
        section.note(run.reason)
    section.add(f"{name}: healthy roll-outs rolled back", _percent(rolled_back, runs), "%", 1)
    in_time = [run for run in runs if run.decision == "promote" and max(run.requests) <= PROMOTED_WITHIN]
    title = f"{name}: healthy roll-outs with every step promoted within {PROMOTED_WITHIN} requests"
    section.add(title, _percent(in_time, runs), "%", 95, "least")


def _found(loss: float, by_probability: bool) -> float:
    ends = [golden_verdict(seed, loss, by_probability) for seed in range(ROLLOUTS)]
    return _percent([end for end in ends if end == "rollback"], ends)


def _percent(some: Sequence[object], of: Sequence[object]) -> float:
    return 100 * len(some) / len(of)
