"""The verdict on a roll-out, for other controllers: Argo Rollouts and Flagger's hooks.

Both controllers exchange pods themselves, and ask this API whether they may continue. Without
`--auto`, a roll-out is judged, but control does not change its weights.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from pydantic import BaseModel, Field

from llmops.control.admin.schemas import SafeText
from llmops.control.api_route import CurrentCaller, make_router
from llmops.control.rollouts.judge import Decision
from llmops.control.rollouts.state_machine import RolloutState
from llmops.control.store_access import ConflictError, StoreOfApp, client_errors
from llmops.gateway.errors import NotFoundError
from llmops.gateway.logging_setup import request_logger
from llmops.store import rollouts
from llmops.store.damaged_rows import name_damaged
from llmops.untrusted_text import escape_unsafe

log = request_logger(__name__)

#: Types of Flagger's hooks that confirm a step and therefore wait for a verdict.
CONFIRMATIONS = ("confirm-traffic-increase", "confirm-promotion")

HookType = Literal[
    "confirm-rollout",
    "pre-rollout",
    "rollout",
    "confirm-traffic-increase",
    "confirm-promotion",
    "post-rollout",
    "rollback",
    "event",
]

router = make_router(prefix="/api/rollouts", tags=["admin"])


class RolloutVerdict(BaseModel):
    """The verdict on a model's latest roll-out.

    `decision` is `continue` until the judge has a verdict.
    """

    model: str
    state: str
    percent: float
    decision: Decision
    reason: str


class FlaggerPayload(BaseModel):
    """The body of Flagger's webhooks. Fields of newer versions are ignored."""

    name: str = Field(max_length=253)
    phase: str = Field("", max_length=63)


ModelName = Annotated[SafeText, Query(description="The model of the roll-out.")]


@router.get("/verdict", summary="Show the verdict of a model's latest roll-out")
async def read_verdict(store: StoreOfApp, caller: CurrentCaller, model: ModelName) -> RolloutVerdict:
    async with store.in_turn(caller), store.read() as connection:
        with client_errors():
            rollout = await rollouts.find_latest_rollout(connection, model)
    if rollout is None:
        raise NotFoundError(f"{model} has had no roll-out; start one with `llmops rollout start {model}`.")
    decision: Decision = "continue"
    reason = "The judge has no verdict yet."
    with client_errors(), name_damaged("roll-out of", model):
        match RolloutState(rollout.state):
            case RolloutState.ROLLING_BACK | RolloutState.ROLLED_BACK:
                decision, reason = "rollback", rollout.reason
            case RolloutState.KEEPING | RolloutState.RETIRING | RolloutState.PROMOTED:
                decision, reason = "promote", rollout.reason
            case _ if rollout.verdict is not None:
                decision, reason = rollout.verdict["decision"], rollout.verdict["reason"]
        return RolloutVerdict(
            model=model, state=rollout.state, percent=rollout.percent, decision=decision, reason=reason
        )


@router.post("/flagger/{hook}", summary="Answer a webhook of Flagger")
async def answer_flagger(
    store: StoreOfApp, caller: CurrentCaller, hook: HookType, model: ModelName, body: FlaggerPayload
) -> RolloutVerdict:
    """Answer 200 if Flagger may continue, else 409.

    A rollback hook gets 200 if Flagger must roll back.
    """
    log.info("Flagger called the hook %s for %s (phase %s).", hook, escape_unsafe(body.name), escape_unsafe(body.phase))
    verdict = await read_verdict(store, caller, model)
    if hook in CONFIRMATIONS:
        passes = verdict.decision == "promote"
    elif hook == "rollback":
        passes = verdict.decision == "rollback"
    else:
        # hooks that only notify always pass; the other hooks hold a roll-out only if it has failed
        passes = hook in ("post-rollout", "event") or verdict.decision != "rollback"
    if not passes:
        raise ConflictError(f"The roll-out of {model}: {verdict.decision}. {verdict.reason}", code=verdict.decision)
    return verdict
