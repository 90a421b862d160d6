"""Who pays."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin import wire
from llmops.control.admin.work.limits import changed_limits, limit_fields
from llmops.store.accounts import tenants as rows
from llmops.store.accounts.limits import Limits
from llmops.store.audit import By


async def create(connection: AsyncConnection, by: By, asked: wire.NewTenant) -> wire.Tenant:
    return _told(await rows.create_tenant(connection, asked.id, changed_limits(Limits(), asked), by))


async def list_(connection: AsyncConnection, by: By, asked: wire.TenantsWanted) -> tuple[wire.Tenant, ...]:
    return tuple(_told(one) for one in await rows.list_tenants(connection, deleted=asked.all))


async def show(connection: AsyncConnection, by: By, asked: wire.TenantName) -> wire.Tenant:
    return _told(await rows.require_tenant(connection, asked.tenant))


async def update(connection: AsyncConnection, by: By, asked: wire.TenantChange) -> wire.Tenant:
    found = await rows.require_tenant(connection, asked.tenant)
    return _told(await rows.update_tenant(connection, asked.tenant, changed_limits(found.limits, asked), by))


async def delete(connection: AsyncConnection, by: By, asked: wire.TenantName) -> wire.Tenant:
    await rows.delete_tenant(connection, asked.tenant, by)
    return await _found(connection, asked.tenant)


async def restore(connection: AsyncConnection, by: By, asked: wire.TenantName) -> wire.Tenant:
    await rows.restore_tenant(connection, asked.tenant, by)
    return await _found(connection, asked.tenant)


async def _found(connection: AsyncConnection, name: str) -> wire.Tenant:
    found = await rows.find_tenant(connection, name)
    assert found is not None
    return _told(found)


def _told(row: rows.Tenant) -> wire.Tenant:
    return wire.Tenant(id=row.id, **limit_fields(row.limits), created_at=row.created_at, deleted_at=row.deleted_at)
