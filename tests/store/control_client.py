"""Control in front of a store, for tests: its application without a server, or asked through the CLI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import httpx

from llmops.control.app import create_app
from llmops.gateway.settings import GatewaySettings
from llmops.store.accounts.keys import SCOPES, KeySpec, create_key
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant, find_tenant
from llmops.store.accounts.users import ensure_user
from llmops.store.audit import AuditContext
from llmops.store.factory import open_store
from tests.support.gateway_stack import app_client

# before all that a test does
BY = AuditContext("cli:tester", datetime(2026, 1, 1, tzinfo=UTC))


async def make_key(url: str, tenant: str = "ops", limits: Limits = Limits(), **spec) -> tuple[str, str, str]:
    """Its secret, its id and its user's; with all scopes unless said otherwise."""
    async with await open_store(url) as store, store.write() as connection:
        if await find_tenant(connection, tenant) is None:
            await create_tenant(connection, tenant, Limits(), BY)
        user = await ensure_user(connection, tenant, f"admin@{tenant}", BY)
        key, secret = await create_key(connection, user, KeySpec(**{"scopes": SCOPES, **spec, "limits": limits}), BY)
    return secret, key.id, user.id


@asynccontextmanager
async def control(url: str, gateway: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    async with app_client(create_app(GatewaySettings(store=url), tuple, gateway), "http://127.0.0.1") as client:
        yield client


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}
