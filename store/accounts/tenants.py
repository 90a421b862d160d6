"""Tenants. A tenant pays for the usage of all keys of its users."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice

from sqlalchemy import RowMapping, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import DuplicateNameError, InputError, UnknownResourceError
from llmops.store.accounts.limits import Limits
from llmops.store.audit import AuditContext, record_action
from llmops.store.columns import insert
from llmops.store.damaged_rows import name_damaged, read_undamaged
from llmops.store.tables import tenants

#: Maximum number of names that a suggestion considers. Comparing 10,000 blocks the event loop for a
#: second.
MAX_COMPARED = 200


def did_you_mean(typed: str, known: Iterable[str]) -> str:
    """Return a suggestion for an error message, or an empty string if no known name is close.

    Only the first MAX_COMPARED names with the same first character are considered.
    """
    alike = islice((name for name in known if name[:1] == typed[:1]), MAX_COMPARED)
    close = difflib.get_close_matches(typed, alike, 1)
    return f" (did you mean {close[0]}?)" if close else ""


_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Tenant:
    """A tenant. The limits apply to all keys of the tenant together."""

    id: str
    limits: Limits
    created_at: datetime
    deleted_at: datetime | None = None


async def create_tenant(connection: AsyncConnection, tenant_id: str, limits: Limits, by: AuditContext) -> Tenant:
    """Create a tenant.

    Raises:
        InputError: The name is invalid.
        DuplicateNameError: A tenant of this name exists, or existed and was deleted.
    """
    if not _NAME.fullmatch(tenant_id):
        raise InputError(
            f"{tenant_id!r} cannot name a tenant; write up to 63 lower-case letters, digits, dots, - and _."
        )
    made = Tenant(tenant_id, limits, by.at)
    statement = insert(connection, tenants).values(id=tenant_id, created_at=by.at, **limits.columns())
    done = await connection.execute(statement.on_conflict_do_nothing())
    if done.rowcount == 0:
        found = await find_tenant(connection, tenant_id)
        deleted = found is not None and found.deleted_at is not None
        does = ("restore", "brings it back") if deleted else ("update", "changes it")
        raise DuplicateNameError(
            f"The tenant {tenant_id} already exists{', deleted' if deleted else ''}; "
            f"`llmops tenant {does[0]} {tenant_id}` {does[1]}."
        )
    await record_action(connection, by, "tenant.create", tenant_id, tenant_id, limits.data())
    return made


async def find_tenant(connection: AsyncConnection, tenant_id: str) -> Tenant | None:
    """Return a tenant, or None if there is none. Deleted tenants are returned too.

    Raises:
        InputError: A value of the tenant's row is damaged.
    """
    with name_damaged("tenant", tenant_id):
        row = (await connection.execute(select(tenants).where(tenants.c.id == tenant_id))).mappings().first()
        return None if row is None else _tenant(row)


async def require_tenant(connection: AsyncConnection, tenant_id: str) -> Tenant:
    """Return a tenant that is not deleted.

    Raises:
        UnknownResourceError: No such tenant exists. The message suggests a similar name.
    """
    found = await find_tenant(connection, tenant_id)
    if found is None:
        names = [tenant.id for tenant in await list_tenants(connection)]
        raise UnknownResourceError(
            f"There is no tenant {tenant_id}{did_you_mean(tenant_id, names)}; `llmops tenant create {tenant_id}` "
            "makes one."
        )
    if found.deleted_at is not None:
        raise UnknownResourceError(
            f"The tenant {tenant_id} was deleted; `llmops tenant restore {tenant_id}` brings it back."
        )
    return found


async def lock_tenant(connection: AsyncConnection, tenant_id: str) -> Tenant:
    """Return a tenant as `require_tenant` does, and lock it until the transaction ends."""
    await connection.execute(select(tenants.c.id).where(tenants.c.id == tenant_id).with_for_update(key_share=True))
    return await require_tenant(connection, tenant_id)


async def list_tenants(connection: AsyncConnection, deleted: bool = False) -> Sequence[Tenant]:
    """Return the tenants by name. With `deleted`, include deleted tenants.

    A tenant with a damaged value is left out and logged.
    """
    statement = select(tenants).order_by(tenants.c.id)
    if not deleted:
        statement = statement.where(tenants.c.deleted_at.is_(None))
    return await read_undamaged(connection, statement, _tenant, "tenant", tenants.c.id)


async def find_deleted_tenants(connection: AsyncConnection, names: Sequence[str]) -> Sequence[str]:
    """Return the deleted tenants among `names`."""
    statement = select(tenants.c.id).where(tenants.c.id.in_(names), tenants.c.deleted_at.is_not(None))
    return (await connection.execute(statement)).scalars().all()


async def update_tenant(connection: AsyncConnection, tenant_id: str, limits: Limits, by: AuditContext) -> Tenant:
    """Replace the limits of a tenant. Raises the errors of `require_tenant`."""
    found = await require_tenant(connection, tenant_id)
    await connection.execute(tenants.update().where(tenants.c.id == tenant_id).values(**limits.columns()))
    await record_action(connection, by, "tenant.update", tenant_id, tenant_id, limits.data())
    return replace(found, limits=limits)


async def delete_tenant(connection: AsyncConnection, tenant_id: str, by: AuditContext) -> None:
    """Delete a tenant, even one whose row is damaged. The usage and bill of the tenant remain.

    Requests with the tenant's keys are rejected from now on, and running answers for the keys end.
    Raises the errors of `require_tenant`.
    """
    statement = tenants.update().where(tenants.c.id == tenant_id, tenants.c.deleted_at.is_(None))
    if (await connection.execute(statement.values(deleted_at=by.at))).rowcount == 0:
        await require_tenant(connection, tenant_id)
    await record_action(connection, by, "tenant.delete", tenant_id, tenant_id)


async def restore_tenant(connection: AsyncConnection, tenant_id: str, by: AuditContext) -> Tenant:
    """Undo `delete_tenant`, so that the tenant's keys work again.

    Raises:
        UnknownResourceError: No deleted tenant has this name.
    """
    statement = tenants.update().where(tenants.c.id == tenant_id, tenants.c.deleted_at.is_not(None))
    if (await connection.execute(statement.values(deleted_at=None))).rowcount == 0:
        raise UnknownResourceError(
            f"There is no deleted tenant {tenant_id}; `llmops tenant list --all` shows deleted tenants."
        )
    await record_action(connection, by, "tenant.restore", tenant_id, tenant_id)
    return await require_tenant(connection, tenant_id)


def _tenant(row: RowMapping) -> Tenant:
    return Tenant(row["id"], Limits.from_row(row), row["created_at"], row["deleted_at"])
