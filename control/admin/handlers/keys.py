"""Who may ask, and how much."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin import schemas
from llmops.control.admin.handlers.limits import limit_fields, merge_limits
from llmops.store.accounts import keys as rows
from llmops.store.accounts.tenants import require_tenant
from llmops.store.accounts.users import DEFAULT_TIER, ensure_user, require_user
from llmops.store.audit import AuditContext
from llmops.store.usage_queries import spent_micros

# a key always has these; null takes nothing away
_ALWAYS = ("tier", "scopes")
_CHANGED = ("name", *_ALWAYS, "models", "expires_at")


async def create(connection: AsyncConnection, by: AuditContext, asked: schemas.KeyCreate) -> schemas.KeyWithSecret:
    await require_tenant(connection, asked.tenant)
    owner = await ensure_user(connection, asked.tenant, asked.user, by, asked.tier or DEFAULT_TIER)
    key, secret = await rows.create_key(connection, owner, _spec(rows.KeySpec(tier=owner.tier), asked), by)
    return schemas.KeyWithSecret(**_fields(key, by.at), key=secret)


async def list_(
    connection: AsyncConnection, by: AuditContext, asked: schemas.KeyListQuery
) -> tuple[schemas.KeyRead, ...]:
    if asked.tenant:
        await require_tenant(connection, asked.tenant)
    owner = await require_user(connection, asked.user) if asked.user else None
    found = await rows.list_keys(connection, asked.tenant, owner.id if owner else None)
    return tuple(_told(key, by.at) for key in found if asked.all or key.state(by.at) == "active")


async def show(connection: AsyncConnection, by: AuditContext, asked: schemas.KeyReference) -> schemas.KeyDetails:
    found = await rows.require_key(connection, asked.key)
    budget = found.spec.limits.budget
    spent = await spent_micros(connection, budget.begins(by.at), key_id=found.id) if budget else None
    limits = schemas.LimitFields(**limit_fields(found.tenant_limits))
    return schemas.KeyDetails(**_fields(found, by.at), spent_micros=spent, tenant_limits=limits)


async def update(connection: AsyncConnection, by: AuditContext, asked: schemas.KeyUpdate) -> schemas.KeyRead:
    found = await rows.require_key(connection, asked.key)
    return _told(await rows.update_key(connection, found, _spec(found.spec, asked), by), by.at)


async def rotate(connection: AsyncConnection, by: AuditContext, asked: schemas.KeyRotate) -> schemas.KeyWithSecret:
    found = await rows.require_key(connection, asked.key)
    secret = await rows.rotate_key(connection, found, timedelta(seconds=asked.overlap_seconds), by)
    return schemas.KeyWithSecret(**_fields(await rows.require_key(connection, found.id), by.at), key=secret)


async def revoke(connection: AsyncConnection, by: AuditContext, asked: schemas.KeyRevoke) -> schemas.KeyRead:
    found = await rows.require_key(connection, asked.key)
    await rows.revoke_key(connection, found, by, asked.now)
    return _told(await rows.require_key(connection, found.id), by.at)


def _spec(was: rows.KeySpec, asked: schemas.KeyFields) -> rows.KeySpec:
    given = {name: getattr(asked, name) for name in _CHANGED if name in asked.model_fields_set}
    given = {name: value for name, value in given.items() if value is not None or name not in _ALWAYS}
    return replace(was, **given, limits=merge_limits(was.limits, asked))


def _told(key: rows.KeyRow, now: datetime) -> schemas.KeyRead:
    return schemas.KeyRead(**_fields(key, now))


def _fields(key: rows.KeyRow, now: datetime) -> dict[str, Any]:
    spec = key.spec
    return {
        "id": key.id,
        "begins": key.prefix,
        "name": spec.name,
        "tenant": key.tenant_id,
        "user": key.email,
        "tier": spec.tier,
        "scopes": spec.scopes,
        "models": spec.models,
        **limit_fields(spec.limits),
        "created_at": key.created_at,
        "expires_at": spec.expires_at,
        "revoked_at": key.revoked_at,
        "previous_until": key.previous_until,
        "state": key.state(now),
    }
