"""Who changed what, and who was refused."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin import schemas
from llmops.store.audit import AuditContext, list_audit_entries


async def read(
    connection: AsyncConnection, by: AuditContext, asked: schemas.AuditQuery
) -> tuple[schemas.AuditEntryRead, ...]:
    found = await list_audit_entries(connection, asked.tenant, asked.since, asked.limit, asked.action or "")
    return tuple(
        schemas.AuditEntryRead(
            id=one.id,
            created_at=one.created_at,
            actor=one.actor,
            action=one.action,
            subject=one.subject,
            tenant=one.tenant_id,
            detail=dict(one.detail),
        )
        for one in found
    )
