"""Who changed what, and whom the gateway refused. Rows are added, deleted when they are
old (`control/retention.py`), never changed, and hold no secret."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.store.tables import audit


@dataclass(frozen=True)
class AuditContext:
    """Who does something, and when: `AuditContext("cli:alice", now)`."""

    actor: str
    at: datetime


@dataclass(frozen=True)
class AuditLogEntry:
    """One line of the log. `action` is `subject kind.verb`, as `key.create`; `subject` its id."""

    id: str
    created_at: datetime
    actor: str
    action: str
    subject: str
    tenant_id: str | None
    detail: Mapping[str, Any]


async def record_action(
    connection: AsyncConnection,
    by: AuditContext,
    action: str,
    subject: str,
    tenant_id: str | None = None,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Add a line, in the transaction of what it tells about."""
    await connection.execute(
        audit.insert().values(
            id=str(uuid4()),
            created_at=by.at,
            actor=by.actor,
            action=action,
            subject=subject,
            tenant_id=tenant_id,
            detail=dict(detail or {}),
        )
    )


async def list_audit_entries(
    connection: AsyncConnection,
    tenant_id: str | None = None,
    since: datetime | None = None,
    limit: int = 100,
    action: str = "",
) -> Sequence[AuditLogEntry]:
    """The newest first; those whose action begins with `action`."""
    wanted = select(audit).order_by(audit.c.created_at.desc(), audit.c.id).limit(limit)
    if tenant_id is not None:
        wanted = wanted.where(audit.c.tenant_id == tenant_id)
    if since is not None:
        wanted = wanted.where(audit.c.created_at >= since)
    if action:
        wanted = wanted.where(audit.c.action.startswith(action, autoescape=True))
    return [AuditLogEntry(**row) for row in (await connection.execute(wanted)).mappings()]


#: Rows of one transaction: other writers of SQLite wait for no longer than these take.
PRUNE_BATCH_SIZE = 5000


async def prune_audit(connection: AsyncConnection, before: datetime) -> int:
    """Delete up to `PRUNE_BATCH_SIZE` entries that are older than `before`. Return how many were deleted."""
    old = select(audit.c.id).where(audit.c.created_at < before).limit(PRUNE_BATCH_SIZE).scalar_subquery()
    return (await connection.execute(delete(audit).where(audit.c.id.in_(old)))).rowcount
