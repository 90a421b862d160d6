"""A simulated roll-out with the product's traffic split and canary judge."""

from __future__ import annotations

from collections.abc import Callable

from llmops.control.rollouts.judge import CanaryJudge, JudgeSettings, RequestOutcome
from llmops.control.rollouts.state_machine import DEFAULT_STEPS
from llmops.gateway.routing.versions.version_table import ServedVersion, VersionTable
from llmops.perf.simulate.clock import Clock
from llmops.perf.simulate.replica import SimulatedRequest

STABLE, CANDIDATE = "stable", "candidate"
#: Seconds between two verdicts.
VERDICT_INTERVAL = 1.0
#: Seconds that the old replicas stay after the last step, for a return to the old version.
KEEP_OLD = 1800.0


class SimulatedRollout:
    """A simulated roll-out that the judge moves from step to step.

    The new version runs on replicas of its own, beside those of the old version.

    Attributes:
        steps: Time of each step in seconds, and the percentage of requests for the new version.
    """

    def __init__(self, clock: Clock, on_kept: Callable[[], None]) -> None:
        """Create a roll-out whose new version gets no requests yet.

        Args:
            clock: The simulated time.
            on_kept: A function that is called when the old replicas can be removed.
        """
        self.steps: list[tuple[float, float]] = []
        self._clock, self._on_kept = clock, on_kept
        self._judge = CanaryJudge(JudgeSettings(STABLE, CANDIDATE), lambda: clock.now)
        self._move_to(0.0)

    def start(self) -> None:
        """Start the first step of the new version."""
        self._next_step()
        self._clock.at(self._clock.now + VERDICT_INTERVAL, self._look)

    def is_candidate(self, job: SimulatedRequest) -> bool:
        """Return True if the new version answers a request."""
        return self._percent > 0 and self._table.choose("", str(job.session)) == CANDIDATE

    def observe(self, job: SimulatedRequest, is_candidate: bool) -> None:
        """Count a request that has ended. Rejected requests do not count."""
        if job.refused >= 0 or not 0 < self._percent < 100:
            return
        tpot = (job.end - job.first) / (job.answer - 1) if job.answer > 1 else None
        outcome = RequestOutcome(
            version=CANDIDATE if is_candidate else STABLE,
            ok=not job.failed,
            ttft_s=None if job.failed else job.first - job.arrived,
            tpot_s=None if job.failed else tpot,
            prompt_tokens=job.tokens,
            uncached_tokens=job.tokens - job.cached,
            output_tokens=job.answer,
        )
        self._judge.observe(outcome)

    def _look(self) -> None:
        match self._judge.decide()[0]:
            case "rollback":
                self._move_to(0.0)
                return
            case "promote":
                self._next_step()
        if self._clock.is_over:
            return
        if self._percent < 100:
            self._clock.at(self._clock.now + VERDICT_INTERVAL, self._look)
        else:
            self._clock.at(self._clock.now + KEEP_OLD, self._on_kept)

    def _next_step(self) -> None:
        self._move_to(next(step for step in DEFAULT_STEPS if step > self._percent))
        self._judge.begin_step()

    def _move_to(self, percent: float) -> None:
        self._percent = percent
        versions = [ServedVersion(STABLE, weight=100 - percent), ServedVersion(CANDIDATE, weight=percent)]
        self._table = VersionTable({"": versions})
        self.steps.append((self._clock.now, percent))
