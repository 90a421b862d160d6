"""The states of a roll-out, and the transitions between them.

    STARTING ──ready──▶ SHIFTING ◀──promote, resume──┬── PAUSED
        │                │ ▲ │ └──────pause──────────┘
        │     next step──┘ │ └──passed, with `approve`──▶ WAITING ──promote──▶ SHIFTING
        │                  └── (5 → 25 → 50 → 100 %)
        │                last step
        │                  ▼
        │               KEEPING ──old version kept for `keep_old`──▶ RETIRING ──stopped──▶ PROMOTED
        ▼                  │
    ROLLING_BACK ◀──rollback, failed (from every state before RETIRING)
        └──candidate stopped──▶ ROLLED_BACK

The weights of the versions follow from the state alone: the candidate has `percent` of the
requests, a baseline twin has as many, and the stable version has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from typing import Any

from llmops.control.rollouts.analysis import Condition
from llmops.errors import InputError
from llmops.store.rollouts import Rollout

#: Percent of the requests that the candidate gets in each step.
DEFAULT_STEPS = (5.0, 25.0, 50.0, 100.0)
#: Seconds that running answers of a version have to end before its replicas are stopped.
DEFAULT_DRAIN_TIMEOUT = 300.0
#: Seconds for which the old replicas stay: a rollback is a change of weights until then.
DEFAULT_KEEP_OLD = 1800.0


class RolloutState(StrEnum):
    """The states of a roll-out; the module docstring shows the transitions."""

    STARTING = "starting"  # the candidate's replicas start beside the others and are checked
    SHIFTING = "shifting"  # the candidate has its part of the requests and is judged
    WAITING = "waiting"  # the step has passed, and a person has to approve the next one
    PAUSED = "paused"
    KEEPING = "keeping"  # the candidate has all requests, the old replicas are still there
    RETIRING = "retiring"  # the old replicas finish their answers and stop
    PROMOTED = "promoted"
    ROLLING_BACK = "rolling back"  # the candidate gets no requests, finishes its answers and stops
    ROLLED_BACK = "rolled back"


class RolloutEvent(StrEnum):
    """The events that change the state of a roll-out."""

    READY = "ready"  # the candidate's replicas have answered and were checked
    FAILED = "failed"  # they could not be started, or the judge decided against the candidate
    PASSED = "passed"  # the judge decided for the candidate in this step
    PROMOTE = "promote"
    PROMOTE_FULL = "promote fully"
    PAUSE = "pause"
    RESUME = "resume"
    ROLLBACK = "rollback"
    KEPT = "kept"  # the old replicas were kept long enough
    STOPPED = "stopped"  # the replicas that the state stops have stopped


#: States in which the candidate has requests beside the stable version.
SPLIT_STATES = (RolloutState.SHIFTING, RolloutState.WAITING, RolloutState.PAUSED)
FINAL_STATES = (RolloutState.PROMOTED, RolloutState.ROLLED_BACK)


@dataclass(frozen=True)
class RolloutSettings:
    """The options of a roll-out.

    Attributes:
        steps: Percent of the requests in each step, increasing to 100.
        auto: The judge moves the weights; otherwise its verdict is only shown.
        approve: Every step waits for a person after the judge has passed it.
        drain_timeout: Seconds that running answers have before replicas are stopped.
        keep_old: Seconds for which the old replicas are kept after the last step.
        allow_capacity_loss: Stop old replicas first where there is no room beside them.
        webhook: A URL that gets every transition, or an empty string.
        analysis: PromQL conditions, such as `EXPRESSION < 0.1`, that must hold besides the judge.
        prometheus: The URL of the Prometheus that knows them.
        min_requests: Requests of the candidate in a step before the judge can pass it.
        min_seconds: Seconds of a step before the judge can pass it.
        quality_tolerance: Mean score that the candidate may lose on golden prompts.
        twin: Start a baseline twin where there is room: replicas of the stable version with as cold
            a cache as the candidate's, with which the candidate is compared.
    """

    steps: Sequence[float] = DEFAULT_STEPS
    auto: bool = False
    approve: bool = False
    drain_timeout: float = DEFAULT_DRAIN_TIMEOUT
    keep_old: float = DEFAULT_KEEP_OLD
    allow_capacity_loss: bool = False
    webhook: str = ""
    analysis: Sequence[str] = ()
    prometheus: str = ""
    min_requests: int = 300
    min_seconds: float = 60.0
    quality_tolerance: float = 0.0
    twin: bool = False

    def __post_init__(self) -> None:
        steps = tuple(self.steps)
        if not steps or steps[-1] != 100 or steps[0] <= 0 or any(a >= b for a, b in pairwise(steps)):
            text = ", ".join(f"{step:g}" for step in steps)
            raise InputError(f"The steps {text} do not increase from above 0 to 100 percent; write 5,25,50,100.")

        for text in self.analysis:
            Condition.parse(text)
        if bool(self.analysis) != bool(self.prometheus):
            raise InputError(
                "Conditions and the Prometheus that knows their values belong together; give both --analysis 'QUERY < "
                "0.1' and --prometheus http://HOST:9090."
            )

    @classmethod
    def of(cls, rollout: Rollout) -> RolloutSettings:
        """Return the settings of a stored roll-out. Settings of a newer llmops are left out."""
        known = {name: rollout.settings[name] for name in cls.__dataclass_fields__ if name in rollout.settings}
        return cls(**known)

    def data(self) -> Mapping[str, Any]:
        return asdict(self) | {"steps": list(self.steps), "analysis": list(self.analysis)}


def steps_from(percent: float) -> Sequence[float]:
    """Return the steps of a roll-out whose first step is `percent`."""
    return (percent, *(step for step in DEFAULT_STEPS if step > percent))


def transition(rollout: Rollout, event: RolloutEvent, now: datetime, reason: str = "") -> Rollout:
    """Return the roll-out after an event.

    Raises:
        InputError: The event is impossible in this state.
    """
    state, percent = _next(rollout, event)
    return replace(
        rollout,
        state=state.value,
        percent=percent,
        revision=rollout.revision + 1,
        reason=reason,
        changed_at=now,
        is_open=state not in FINAL_STATES,
    )


def _next(rollout: Rollout, event: RolloutEvent) -> tuple[RolloutState, float]:
    """Return the next state and the percent of the candidate in it."""
    state, settings, percent = RolloutState(rollout.state), RolloutSettings.of(rollout), rollout.percent
    match event:
        case RolloutEvent.READY if state is RolloutState.STARTING:
            return _step_after(settings, 0.0)
        case RolloutEvent.PASSED if state is RolloutState.SHIFTING:
            return (RolloutState.WAITING, percent) if settings.approve else _step_after(settings, percent)
        case RolloutEvent.PROMOTE if state in SPLIT_STATES:
            return _step_after(settings, percent)
        case RolloutEvent.PROMOTE_FULL if state in SPLIT_STATES:
            return RolloutState.KEEPING, 100.0
        case RolloutEvent.PAUSE if state in (RolloutState.SHIFTING, RolloutState.WAITING):
            return RolloutState.PAUSED, percent
        case RolloutEvent.RESUME if state is RolloutState.PAUSED:
            return RolloutState.SHIFTING, percent
        case RolloutEvent.ROLLBACK | RolloutEvent.FAILED if state in (
            RolloutState.STARTING,
            *SPLIT_STATES,
            RolloutState.KEEPING,
        ):
            return RolloutState.ROLLING_BACK, 0.0
        case RolloutEvent.KEPT if state is RolloutState.KEEPING:
            return RolloutState.RETIRING, 100.0
        case RolloutEvent.STOPPED if state is RolloutState.RETIRING:
            return RolloutState.PROMOTED, 100.0
        case RolloutEvent.STOPPED if state is RolloutState.ROLLING_BACK:
            return RolloutState.ROLLED_BACK, 0.0
        case _:
            raise InputError(_impossible(rollout, event))


def _step_after(settings: RolloutSettings, percent: float) -> tuple[RolloutState, float]:
    step = next(step for step in (*settings.steps, 100.0) if step > percent or step == 100)
    return (RolloutState.KEEPING if step == 100 else RolloutState.SHIFTING), step


def _impossible(rollout: Rollout, event: RolloutEvent) -> str:
    advice = {
        RolloutState.STARTING: "wait until its replicas are ready",
        RolloutState.KEEPING: f"`llmops rollout rollback {rollout.model}` returns to {rollout.stable}",
    }.get(RolloutState(rollout.state), f"`llmops rollout status {rollout.model}` shows what it does")
    return f"The roll-out of {rollout.model} is {rollout.state}, so the event '{event}' changes nothing; {advice}."
