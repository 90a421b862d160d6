"""The short way of POSTs to exact paths: one look-up, then the endpoint.

A web framework's layers are worth their time where a request is rare. Here they were a seventh of what a request cost
(docs/decisions/0005-cost-of-a-request.md), for nothing that our endpoints use: they read their bodies themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from llmops.gateway.errors import ApiError
from llmops.gateway.http.failures import respond_with

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """An ASGI application of one route. `path` is what the metrics call it."""

    path: str
    handle: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self
        try:
            response = await self.handle(Request(scope, receive))
        except ApiError as error:
            response = respond_with(error, scope)
        await response(scope, receive, send)


class ExpressApp(FastAPI):
    """A FastAPI application whose `express` routes, POSTs to exact paths, go past everything that is FastAPI's.

    A middleware or a handler of exceptions that is added later sees all requests: there is no short way then.
    """

    express: Mapping[str, ASGIApp] = MappingProxyType({})

    def add_middleware(self, *args: Any, **kwargs: Any) -> None:
        self.express = {}
        super().add_middleware(*args, **kwargs)

    def add_exception_handler(self, *args: Any, **kwargs: Any) -> None:
        self.express = {}
        super().add_exception_handler(*args, **kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.express.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if app is None:
            await super().__call__(scope, receive, send)
        else:
            await app(scope, receive, send)
