"""The short way of POSTs to exact paths: one look-up, then the endpoint.

A web framework's layers are worth their time where a request is rare. Here they were a seventh of what a request cost
(docs/decisions/0004), for nothing that our endpoints use: they read their bodies themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from llmops.gateway.http.api_docs import add_docs_pages
from llmops.gateway.http.error_handlers import ExceptionHandlers, handle_exception
from llmops.gateway.http.middleware import Check, RequestMiddleware

RequestHandler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class FastRoute:
    """An ASGI application of one route. `handlers`: those of the application for exceptions."""

    handle: RequestHandler
    handlers: ExceptionHandlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self.handle(request)
        except Exception as error:  # noqa: BLE001  every way out of an endpoint is an answer
            response = await handle_exception(error, request, self.handlers)
        await response(scope, receive, send)


class GatewayApp(FastAPI):
    """A FastAPI application whose `express` routes, POSTs to exact paths, go past everything that is FastAPI's.

    All requests go through one Door first; middlewares and handlers of exceptions hold for both ways.
    """

    express: Mapping[str, ASGIApp] = MappingProxyType({})

    def __init__(self, *, checks: Sequence[Check] = (), **fastapi: Any) -> None:
        super().__init__(docs_url=None, redoc_url=None, **fastapi)
        add_docs_pages(self)
        self._checks = checks
        self._entrance: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._entrance is None:
            self._entrance = self._built()
        await self._entrance(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """FastAPI's own layers: middlewares are around both ways, and the door answers to crashes, not Starlette."""
        middlewares, self.user_middleware = self.user_middleware, []
        try:
            crashes: Any = super().build_middleware_stack()
        finally:
            self.user_middleware = middlewares
        layers: ASGIApp = crashes.app
        return layers

    def _built(self) -> ASGIApp:
        app: ASGIApp = self._fork
        for middleware, args, kwargs in reversed(self.user_middleware):
            app = middleware(app, *args, **kwargs)
        return RequestMiddleware(app, self._route_of, self._checks, self.exception_handlers)

    def _fork(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """The short way where there is one."""
        app = self.express.get(scope["path"]) if scope.get("method") == "POST" else None
        return (app or super().__call__)(scope, receive, send)

    def _route_of(self, scope: Scope) -> str:
        """The path template of the route that will get the request; empty where none has its path."""
        if scope["path"] in self.express and scope["method"] == "POST":
            return str(scope["path"])
        # as Starlette's router decides: the first that takes it, else the first that has its path for another method
        other = ""
        for route in self.router.routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return path_template(route)
            if match is Match.PARTIAL:
                other = other or path_template(route)
        return other


def path_template(route: BaseRoute) -> str:
    """The path template of a route or mount; Host routes, which have none, count as all paths."""
    return getattr(route, "path", "") or "/"
