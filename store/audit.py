"""The audit log: administrative changes, rejected requests and findings of safety filters.

Entries are inserted, never changed, and deleted when they are old (`control/retention.py`). They
contain no secrets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import RowMapping, and_, delete, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.store.columns import database_time
from llmops.store.damaged_rows import read_undamaged
from llmops.store.tables import audit


@dataclass(frozen=True)
class AuditContext:
    """The actor and the time of a change, such as `AuditContext("cli:alice", now)`."""

    actor: str
    at: datetime


@dataclass(frozen=True)
class AuditLogEntry:
    """An entry of the audit log.

    Attributes:
        id: Id of the entry.
        created_at: Time of the change.
        actor: The actor, such as `cli:alice`.
        action: Kind of the subject and verb, such as `key.create`.
        subject: Id of the changed object.
        tenant_id: The tenant concerned, or None.
        detail: Further data of the change.
    """

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
    """Insert an entry in the same transaction as the change that the entry describes."""
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
    subject: str | None = None,
    changes_only: bool = False,
    after: AuditLogEntry | None = None,
) -> Sequence[AuditLogEntry]:
    """Return entries, the newest first. An entry with a damaged value is left out and logged.

    Args:
        connection: A connection to the store.
        tenant_id: Only entries of this tenant.
        since: Only entries since this time.
        limit: Maximum number of entries.
        action: Only entries whose action begins with this text.
        subject: Only entries about this subject.
        changes_only: True to leave out rejected requests and findings of safety filters.
        after: The last entry of the previous page, or None for the first page.
    """
    statement = select(audit).order_by(audit.c.created_at.desc(), audit.c.id)
    if after is not None:
        same = and_(audit.c.created_at == after.created_at, audit.c.id > after.id)
        statement = statement.where(or_(audit.c.created_at < after.created_at, same))
    if tenant_id is not None:
        statement = statement.where(audit.c.tenant_id == tenant_id)
    if since is not None:
        statement = statement.where(audit.c.created_at >= since)
    if subject is not None:
        statement = statement.where(audit.c.subject == subject)
    if changes_only:
        statement = statement.where(audit.c.action.not_like("access.%"), audit.c.action.not_like("safety.%"))
    if action:
        statement = statement.where(audit.c.action.startswith(action, autoescape=True))
    return await read_undamaged(connection, statement, _entry, "audit entry", audit.c.id, limit)


def _entry(row: RowMapping) -> AuditLogEntry:
    return AuditLogEntry(**{**row, "detail": dict(row["detail"])})


#: Maximum number of rows that one transaction deletes, because SQLite's other writers wait for the
#: transaction.
PRUNE_BATCH_SIZE = 5000


async def prune_audit(connection: AsyncConnection, before: datetime) -> int:
    """Delete up to PRUNE_BATCH_SIZE entries older than `before`. Return the number deleted."""
    old = select(audit.c.id).where(audit.c.created_at < database_time(connection, before)).limit(PRUNE_BATCH_SIZE)
    return (await connection.execute(delete(audit).where(audit.c.id.in_(old.scalar_subquery())))).rowcount
