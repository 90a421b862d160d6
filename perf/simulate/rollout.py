"""A simulated roll-out: the product's split of requests and its judge, in simulated time."""

from __future__ import annotations

from collections.abc import Callable

from llmops.control.rollouts.judge import CanaryJudge, JudgeSettings, RequestOutcome
from llmops.control.rollouts.state_machine import DEFAULT_STEPS
from llmops.gateway.routing.versions.version_table import ServedVersion, VersionTable
from llmops.perf.simulate.clock import Clock
from llmops.perf.simulate.replica import SimulatedRequest

STABLE, CANDIDATE = "stable", "candidate"
#: Seconds between two verdicts, and between the new version's last step and the end of the old one.
VERDICT_INTERVAL, KEEP_OLD = 1.0, 1800.0


class SimulatedRollout:
    """A roll-out to replicas beside the old ones, judged and moved step by step.

    Attributes:
        steps: Times in seconds, and the percent of the requests that the new version gets from then
            on.
    """

    def __init__(self, clock: Clock, on_kept: Callable[[], None]) -> None:
        """Create a roll-out whose new version has no requests yet.

        Args:
            clock: The time.
            on_kept: Called when the old replicas have been kept for long enough.
        """
        self.steps: list[tuple[float, float]] = []
        self._clock, self._on_kept = clock, on_kept
        self._judge = CanaryJudge(JudgeSettings(STABLE, CANDIDATE), lambda: clock.now)
        self._move_to(0.0)

    def start(self) -> None:
        """Give the new version its first step."""
        self._next_step()
        self._clock.at(self._clock.now + VERDICT_INTERVAL, self._look)

    def is_candidate(self, job: SimulatedRequest) -> bool:
        """Return True if the new version answers a request."""
        return self._percent > 0 and self._table.choose("", str(job.session)) == CANDIDATE

    def observe(self, job: SimulatedRequest, is_candidate: bool) -> None:
        """Count a request that has ended. Rejected requests say nothing about a version."""
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
