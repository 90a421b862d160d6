"""The key that `llmops up` makes where there is none."""

from __future__ import annotations

import asyncio

from llmops.cli.accounts.local_store import current_audit_context

TENANT, USER = "default", "admin@localhost"


def first_key(url: str) -> str:
    """A key for the owner of a store in which none was ever made; empty where there was one."""
    return asyncio.run(_first_key(url))


async def _first_key(url: str) -> str:
    by = current_audit_context()
    from llmops.store.accounts.keys import SCOPES, KeySpec, create_key, has_any_key
    from llmops.store.accounts.limits import Limits
    from llmops.store.accounts.tenants import create_tenant, find_tenant
    from llmops.store.accounts.users import ensure_user
    from llmops.store.factory import open_store

    async with await open_store(url, pool_size=1) as store, store.write() as connection:
        if await has_any_key(connection):
            return ""
        if await find_tenant(connection, TENANT) is None:
            await create_tenant(connection, TENANT, Limits(), by)
        owner = await ensure_user(connection, TENANT, USER, by)
        _, secret = await create_key(connection, owner, KeySpec(name="first", scopes=SCOPES), by)
        return secret
