"""Who changed what, and who was refused."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin import wire
from llmops.store.audit import By, entries


async def read(connection: AsyncConnection, by: By, asked: wire.AuditWanted) -> tuple[wire.AuditEntry, ...]:
    found = await entries(connection, asked.tenant, asked.since, asked.limit, asked.action or "")
    return tuple(
        wire.AuditEntry(
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
