"""A pytest plugin that makes what each of a thousand gateways in tests would make again: most of a start's time."""

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import fastapi.routing
import httpx._transports.default
import uvicorn.server

# The certificates of the system, for each client, though no test speaks TLS with a stranger.
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)

_create_model_field = fastapi.routing.create_model_field
_cached_model_field = functools.cache(lambda name, type_, mode: _create_model_field(name, type_, mode=mode))


def _model_field(name: str, type_: Any, mode: Any = "validation", **more: Any) -> Any:
    if more or not isinstance(type_, type):
        return _create_model_field(name, type_, mode=mode, **more)
    return _cached_model_field(name, type_, mode)


# The validators of each response of each route: `create_app` makes 120 of them.
fastapi.routing.create_model_field = _model_field

# uvicorn looks each tenth of a second whether it shall end, and waits as long for its connections.
uvicorn.server.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)})
