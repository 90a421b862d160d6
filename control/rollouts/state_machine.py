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
requests, a baseline twin has as many, and the stable version has the others.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from enum import StrEnum

from llmops.control.rollouts.schemas import RolloutSettings
from llmops.errors import InputError
from llmops.store.damaged_rows import name_damaged
from llmops.store.rollouts import Rollout

#: Percentages of requests that the candidate gets in the steps after the first step.
DEFAULT_STEPS = (5.0, 25.0, 50.0, 100.0)


class RolloutState(StrEnum):
    """The states of a roll-out; the module docstring shows the transitions."""

    STARTING = "starting"  # the candidate's replicas start beside the others and are checked
    SHIFTING = "shifting"  # the candidate gets its percentage of the requests and is judged
    WAITING = "waiting"  # the judge passed the step, and a person must approve the next step
    PAUSED = "paused"
    KEEPING = "keeping"  # the candidate gets all requests, and the old replicas still run
    RETIRING = "retiring"  # the old replicas finish their answers and stop
    PROMOTED = "promoted"
    ROLLING_BACK = "rolling back"  # the candidate gets no requests, finishes its answers and stops
    ROLLED_BACK = "rolled back"


class RolloutEvent(StrEnum):
    """The events that change the state of a roll-out."""

    READY = "ready"  # the candidate's replicas have started and passed their checks
    FAILED = "failed"  # the candidate could not be started, or the judge decided against it
    PASSED = "passed"  # the judge passed the candidate in this step
    PROMOTE = "promote"
    PROMOTE_FULL = "promote fully"
    PAUSE = "pause"
    RESUME = "resume"
    ROLLBACK = "rollback"
    KEPT = "kept"  # the old replicas were kept for `keep_old` seconds
    STOPPED = "stopped"  # all replicas that the state stops have stopped


#: States in which the candidate gets requests beside the stable version.
SPLIT_STATES = (RolloutState.SHIFTING, RolloutState.WAITING, RolloutState.PAUSED)
FINAL_STATES = (RolloutState.PROMOTED, RolloutState.ROLLED_BACK)


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
        open_model=None if state in FINAL_STATES else rollout.model,
    )


def _next(rollout: Rollout, event: RolloutEvent) -> tuple[RolloutState, float]:
    """Return the next state, and the candidate's percentage of requests in that state."""
    with name_damaged("roll-out of", rollout.model):
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
    step = next(step for step in (settings.percent, *DEFAULT_STEPS) if step > percent or step == 100)
    return (RolloutState.KEEPING if step == 100 else RolloutState.SHIFTING), step


def _impossible(rollout: Rollout, event: RolloutEvent) -> str:
    advice = {
        RolloutState.STARTING: "wait until its replicas are ready",
        RolloutState.KEEPING: f"`llmops rollout rollback {rollout.model}` returns to {rollout.stable}",
    }.get(RolloutState(rollout.state), f"`llmops rollout status {rollout.model}` shows what it does")
    return f"The roll-out of {rollout.model} is {rollout.state}, so the event '{event}' is impossible; {advice}."
