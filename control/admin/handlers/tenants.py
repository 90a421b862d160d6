"""Who pays."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin import schemas
from llmops.control.admin.handlers.limits import limit_fields, merge_limits
from llmops.store.accounts import tenants as rows
from llmops.store.accounts.limits import Limits
from llmops.store.audit import AuditContext


async def create(connection: AsyncConnection, by: AuditContext, asked: schemas.TenantCreate) -> schemas.TenantRead:
    return _told(await rows.create_tenant(connection, asked.id, merge_limits(Limits(), asked), by))


async def list_(
    connection: AsyncConnection, by: AuditContext, asked: schemas.TenantListQuery
) -> tuple[schemas.TenantRead, ...]:
    return tuple(_told(one) for one in await rows.list_tenants(connection, deleted=asked.all))


async def show(connection: AsyncConnection, by: AuditContext, asked: schemas.TenantReference) -> schemas.TenantRead:
    return _told(await rows.require_tenant(connection, asked.tenant))


async def update(connection: AsyncConnection, by: AuditContext, asked: schemas.TenantUpdate) -> schemas.TenantRead:
    found = await rows.require_tenant(connection, asked.tenant)
    return _told(await rows.update_tenant(connection, asked.tenant, merge_limits(found.limits, asked), by))


async def delete(connection: AsyncConnection, by: AuditContext, asked: schemas.TenantReference) -> schemas.TenantRead:
    await rows.delete_tenant(connection, asked.tenant, by)
    return await _found(connection, asked.tenant)


async def restore(connection: AsyncConnection, by: AuditContext, asked: schemas.TenantReference) -> schemas.TenantRead:
    await rows.restore_tenant(connection, asked.tenant, by)
    return await _found(connection, asked.tenant)


async def _found(connection: AsyncConnection, name: str) -> schemas.TenantRead:
    found = await rows.find_tenant(connection, name)
    assert found is not None
    return _told(found)


def _told(row: rows.Tenant) -> schemas.TenantRead:
    return schemas.TenantRead(
        id=row.id, **limit_fields(row.limits), created_at=row.created_at, deleted_at=row.deleted_at
    )
