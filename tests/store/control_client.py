"""Control in front of a store, for tests: its application without a server, or asked through the CLI."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from llmops.control.app import create_app
from llmops.gateway.settings import GatewaySettings
from llmops.store.accounts.keys import SCOPES
from llmops.store.factory import open_store
from tests.support.accounts import BY, add_key
from tests.support.gateway_stack import app_client

__all__ = ["BY", "bearer", "control", "make_key"]


async def make_key(url: str, tenant: str = "ops", **spec) -> tuple[str, str, str]:
    """Its secret, its id and its user's; with all scopes unless said otherwise."""
    async with await open_store(url) as store:
        return await add_key(store, tenant, f"admin@{tenant}", **{"scopes": SCOPES, **spec})


@asynccontextmanager
async def control(url: str, gateway: str | None = None, key: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the application, which sends the secret of a key, if one is given."""
    async with app_client(create_app(GatewaySettings(store=url), tuple, gateway), "http://127.0.0.1") as client:
        client.headers.update(bearer(key) if key else {})
        yield client


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}
