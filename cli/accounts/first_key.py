"""The key that `llmops up` makes where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmops.cli.accounts.store import myself, writing

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

TENANT, USER = "default", "admin@localhost"


def first_key(store: str) -> str:
    """A key for the owner of a store in which none was ever made; empty where there was one."""
    by = myself()

    async def work(connection: AsyncConnection) -> str:
        from llmops.store.accounts.keys import SCOPES, KeySpec, any_key, create_key
        from llmops.store.accounts.limits import Limits
        from llmops.store.accounts.tenants import create_tenant, find_tenant
        from llmops.store.accounts.users import ensure_user

        if await any_key(connection):
            return ""
        if await find_tenant(connection, TENANT) is None:
            await create_tenant(connection, TENANT, Limits(), by)
        owner = await ensure_user(connection, TENANT, USER, by)
        _, secret = await create_key(connection, owner, KeySpec(name="first", scopes=SCOPES), by)
        return secret

    return writing(store, work)
