"""What is looked at before the port is open: whether the gateway may be open to whom its host opens it."""

from __future__ import annotations

import asyncio

from llmops.errors import InputError
from llmops.gateway.auth.authentication import create_authentication
from llmops.gateway.settings import GatewaySettings
from llmops.urls import is_loopback


def keys_required(settings: GatewaySettings) -> bool:
    """Whether keys are asked for from the start on.

    Raises InputError for a host that is not this machine's alone where they are not, and what `open_store` raises for
    a store that cannot be opened.
    """
    access = create_authentication(settings)
    # a store is made, or refused, now and not by the first request
    asked = settings.store is not None and access is not None and _has_keys(settings.store)
    asked = asked or (access is not None and settings.oidc is not None)
    if asked or settings.open or is_loopback(settings.host):
        return asked
    missing = "its store has no keys" if settings.store else "it has no store of keys"
    raise InputError(
        f"On {settings.host} the gateway would answer anyone who reaches it, as {missing}: make a key with "
        "`llmops key create` and name its store (--store URL), or say --open."
    )


def exposure_summary(settings: GatewaySettings, asked: bool) -> str:
    """Who can use the gateway, for the line that it starts with."""
    who = "this machine only" if is_loopback(settings.host) else f"anyone who reaches {settings.host}"
    if asked:
        return f"open to {who}, with a key"
    later = ", until its store has a key" if settings.store and not settings.open else ""
    return f"open to {who}, without a key{later}"


def _has_keys(url: str) -> bool:
    from llmops.gateway.auth.keys import store_has_keys

    return asyncio.run(store_has_keys(url))
