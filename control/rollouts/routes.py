"""The routes of the roll-out API, /api/admin/rollouts."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin.routes import AdminRoute, Session, audit_entry_read
from llmops.control.api_route import make_router
from llmops.control.rollouts.runner import apply_event, notify_webhook
from llmops.control.rollouts.schemas import (
    PinCreate,
    RolloutChange,
    RolloutCreate,
    RolloutHistory,
    RolloutQuery,
    RolloutRead,
    RolloutSettings,
)
from llmops.control.rollouts.state_machine import RolloutEvent, RolloutState
from llmops.errors import InputError
from llmops.store import rollouts
from llmops.store.accounts.keys import require_key
from llmops.store.audit import list_audit_entries
from llmops.store.rollouts import ModelVersion, Rollout

router = make_router(prefix="/api/admin/rollouts", tags=["admin"], route_class=AdminRoute)


@router.post("", status_code=201, summary="Start a roll-out")
async def start_rollout(session: Session, body: RolloutCreate) -> RolloutRead:
    settings = body.model_dump(mode="json", include=set(RolloutSettings.model_fields))
    async with session.write() as connection:
        if bool(body.engine) == bool(body.replicas):
            raise InputError(
                "A roll-out needs the candidate's engine folder, or the addresses of its replicas; give one of them."
            )
        if body.replicas and (body.twin or body.allow_capacity_loss):
            raise InputError(
                "The candidate's replicas run already, so that no twin is started and no replica makes room; leave out "
                "--twin and --allow-capacity-loss."
            )
        candidate = ModelVersion(body.model, body.name, body.engine, body.replicas)
        rollout = await rollouts.create_rollout(connection, candidate, RolloutState.STARTING, settings, session.by)
        result = await _read(connection, rollout)
    await notify_webhook(rollout, session.by.actor)
    return result


@router.get("", summary="List roll-outs, the newest first")
async def list_rollouts(session: Session, query: Annotated[RolloutQuery, Query()]) -> tuple[RolloutRead, ...]:
    async with session.read() as connection:
        found = await rollouts.list_rollouts(connection, query.model)
        return tuple([await _read(connection, rollout) for rollout in found])


@router.get("/history", summary="List the transitions of roll-outs and their actors")
async def read_history(session: Session, query: Annotated[RolloutQuery, Query()]) -> RolloutHistory:
    async with session.read() as connection:
        found = await list_audit_entries(connection, limit=1000, action="rollout.", subject=query.model)
    return RolloutHistory(entries=tuple(map(audit_entry_read, found)))


@router.post("/actions", summary="Promote, pause, resume or roll back")
async def change_rollout(session: Session, body: RolloutChange) -> RolloutRead:
    async with session.write() as connection:
        rollout = await rollouts.require_open_rollout(connection, body.model)
        reason = body.reason or f"{body.action} by {session.by.actor}"
        changed = await apply_event(connection, rollout, RolloutEvent(body.action), session.by, reason)
        result = await _read(connection, changed)
    await notify_webhook(changed, session.by.actor)
    return result


@router.post("/pins", summary="Pin a key to a version, or remove its pin")
async def pin_key(session: Session, body: PinCreate) -> PinCreate:
    async with session.write() as connection:
        key = (await require_key(connection, body.key)).id
        await rollouts.pin_key(connection, body.model, key, body.version, session.by)
    return body.model_copy(update={"key": key})


async def _read(connection: AsyncConnection, rollout: Rollout) -> RolloutRead:
    versions = await rollouts.list_versions(connection, rollout.model)
    shared = {name: value for name, value in vars(rollout).items() if name in RolloutRead.model_fields}
    return RolloutRead.model_validate(shared | {"open": rollout.is_open, "versions": versions}, from_attributes=True)
