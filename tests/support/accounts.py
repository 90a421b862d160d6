"""Keys in a store, as an administrator makes them."""

from datetime import UTC, datetime

from llmops.store.accounts.keys import KeySpec, create_key
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant, find_tenant
from llmops.store.accounts.users import ensure_user
from llmops.store.audit import AuditContext
from llmops.store.database import Store

# before all that a test does
BY = AuditContext("cli:tester", datetime(2026, 1, 1, tzinfo=UTC))


async def add_key(
    store: Store, tenant: str, user: str = "", by: AuditContext = BY, **spec: object
) -> tuple[str, str, str]:
    """Add a key of a user, and its tenant if it is missing. Return its secret, its id and its user's."""
    async with store.write() as connection:
        if await find_tenant(connection, tenant) is None:
            await create_tenant(connection, tenant, Limits(), by)
        owner = await ensure_user(connection, tenant, user or f"ann@{tenant}", by)
        key, secret = await create_key(connection, owner, KeySpec(**spec), by)
    return secret, key.id, owner.id
