"""The gateway's ASGI application: middleware that runs checks, and a fast path for hot routes.

A check has two hooks: `before` runs when a request arrives and may reject it, `after` runs once
when the request has ended, whatever the outcome. Authentication, rate limits, usage, metrics and
tracing are checks. They run in the order in which they were registered; the first rejection ends
the request.

POST requests to exact paths skip FastAPI's router and middleware: one dictionary lookup leads to
their endpoint. The framework's layers were a seventh of the cost of a request, for nothing that
these endpoints use: they read their bodies themselves (docs/decisions/0004).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmops.gateway.errors import ApiError, log_detail
from llmops.gateway.http.api_docs import add_docs_pages
from llmops.gateway.http.chunked_writer import SERVER_SEND_KEY, WRITE_BATCH_KEY, WriteBatch, abort_response
from llmops.gateway.http.error_handlers import ExceptionHandlers, handle_exception
from llmops.gateway.http.openapi import add_body_schemas, route_docs
from llmops.gateway.http.request_context import RequestContext, create_context
from llmops.gateway.interfaces import Outcome
from llmops.gateway.logging_setup import current_request

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
BeforeHook = Callable[[Scope, RequestContext], Awaitable[None]]
AfterHook = Callable[[RequestContext, Outcome], None]


class Check:
    """A pair of hooks around every request. Subclasses override one of them or both."""

    def applies_to(self, method: str, route: str) -> bool:
        """Return False for a method and path template to which neither hook applies.

        Called once per method and path template.
        """
        return True

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Inspect a request before it reaches its endpoint. Not called for paths without a route.

        Args:
            scope: The ASGI connection scope.
            context: The request's context. `context.route` names the endpoint; the hook may set
                `context.caller`.

        Raises:
            ApiError: Rejects the request with the error's status and message.
        """

    def adopt(self, context: RequestContext) -> None:
        """Prepare to bill a request that another gateway began and this gateway ends.

        Must not reject the request.
        """

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        """Record how a request ended.

        Called exactly once, also for rejected requests. Must not raise.
        """


class RequestMiddleware:
    """ASGI middleware that gives each request its context and runs the checks.

    The middleware also adds the standard response headers, and stores the server's own `send` in
    the scope, for event streams that bypass ASGI (http/chunked_writer.py).
    """

    def __init__(
        self,
        app: ASGIApp,
        route_of: Callable[[Scope], str],
        checks: Sequence[Check] = (),
        handlers: ExceptionHandlers = MappingProxyType({}),
    ) -> None:
        """Wrap `app`.

        Args:
            app: The application.
            route_of: Returns the path template of the route for a scope, empty if no route matches.
            checks: The checks, in the order in which they run.
            handlers: The application's exception handlers, by class of exception.
        """
        self._app, self._route_of, self._handlers = app, route_of, handlers

        # The cache is bounded, because clients can send any method.
        @lru_cache(maxsize=1024)
        def hooks_of(method: str, route: str) -> tuple[Sequence[BeforeHook], Sequence[AfterHook]]:
            applying = [check for check in checks if check.applies_to(method, route)]
            before = [check.before for check in applying if route and type(check).before is not Check.before]
            return before, [check.after for check in applying if type(check).after is not Check.after]

        self._hooks_of = hooks_of
        self._write_batch = WriteBatch()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request. Events of the ASGI lifespan are passed through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = create_context(scope)
        current_request.set(context.request_id)
        context.route = self._route_of(scope)
        scope[SERVER_SEND_KEY], scope[WRITE_BATCH_KEY] = send, self._write_batch
        before_hooks, after_hooks = self._hooks_of(scope["method"], context.route)
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = dict(context.response_headers())
                for name in extra.keys() & dict(message["headers"]).keys():
                    del extra[name]
                message["headers"] = [*message["headers"], *extra.items()]
            await send(message)

        try:
            for before in before_hooks:
                await before(scope, context)
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            if status and _is_connection_closed(send):
                context.finish_reason = context.finish_reason or "cancelled"
                _release_frames(error)
                return
            if status:
                context.finish_reason = "error"
                # Starlette replaces the error with its own, which only says that the response has
                # already started.
                failure = error if isinstance(error, ApiError) else error.__cause__
                if isinstance(failure, ApiError) and abort_response(send):
                    log_detail(failure)
                    _release_frames(error)
                    return
                raise
            response = await handle_exception(error, Request(scope, receive), self._handlers)
            await response(scope, receive, send_with_headers)
        finally:
            # The server object that `send` belongs to also holds this scope. Removing `send` from
            # the scope breaks the reference cycle.
            scope.pop(SERVER_SEND_KEY, None)
            if context.background_task is not None:
                context.background_task.add_done_callback(lambda _: _run_after_hooks(after_hooks, context, status))
            else:
                _run_after_hooks(after_hooks, context, status)


def _run_after_hooks(hooks: Iterable[AfterHook], context: RequestContext, status: int) -> None:
    outcome = Outcome(status, context.finish_reason or _default_finish_reason(status), context.usage)
    for after in hooks:
        try:
            after(context, outcome)
        except Exception:
            log.exception(
                "Request %s: a check failed after the request had ended; the response is not affected",
                context.request_id,
            )


class GatewayApp(FastAPI):
    """A FastAPI application with a fast path for hot routes.

    Checks, middleware and exception handlers apply to both paths.

    Attributes:
        fast_routes: The ASGI applications of the fast path, by the path of their POST requests.
        body_models: The models of bodies that endpoints read themselves, for the OpenAPI document.
    """

    def __init__(self, *, checks: Sequence[Check] = (), **fastapi: Any) -> None:
        super().__init__(docs_url=None, redoc_url=None, openapi_url=None, **fastapi)
        self.fast_routes: dict[str, ASGIApp] = {}
        self._checks = checks
        self.body_models: list[type[BaseModel]] = []
        add_docs_pages(self)

    def add_endpoint(
        self,
        method: str,
        path: str,
        endpoint: Endpoint,
        summary: str,
        response: type[BaseModel],
        *,
        body: type[BaseModel] | None = None,
        **docs: Any,
    ) -> None:
        """Serve an endpoint, on the fast path if possible, and describe it in the OpenAPI document.

        Args:
            method: The HTTP method.
            path: The path template.
            endpoint: Returns the response.
            summary: The operation in a few words.
            response: The model of the response.
            body: The model of the request's body.
            docs: Further arguments of `route_docs`.
        """
        if body is not None:
            self.body_models.append(body)
        described = route_docs(summary, response, body=body, **docs)
        if method == "POST" and "{" not in path:
            self.add_fast_route(path, endpoint, response_model=None, **described)
        else:
            self.add_api_route(path, endpoint, methods=[method], response_model=None, **described)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document.

        The document includes the schemas of bodies that endpoints read themselves.
        """
        if self.openapi_schema is None and self.body_models:
            add_body_schemas(super().openapi(), self.body_models)
        return super().openapi()

    def add_fast_route(self, path: str, endpoint: Endpoint, **docs: Any) -> None:
        """Serve POST requests to an exact path on the fast path.

        The route is added to FastAPI too, for the OpenAPI document (`docs`) and for requests with
        another method.
        """
        self.add_api_route(path, endpoint, methods=["POST"], **docs)
        self.fast_routes[path] = _fast_route(endpoint, self.exception_handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, without the stack frames of FastAPI and Starlette."""
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        scope["app"] = self
        await self.middleware_stack(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """Return the application with checks and middleware around both paths.

        RequestMiddleware replaces Starlette's ServerErrorMiddleware.
        """
        middleware, self.user_middleware = self.user_middleware, []
        try:
            outermost: Any = super().build_middleware_stack()
        finally:
            self.user_middleware = middleware
        framework: ASGIApp = outermost.app

        def dispatch(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            fast = self.fast_routes.get(scope["path"]) if scope.get("method") == "POST" else None
            return (fast or framework)(scope, receive, send)

        app: ASGIApp = dispatch
        for wrap, args, kwargs in reversed(middleware):
            app = wrap(app, *args, **kwargs)
        return RequestMiddleware(app, self._route_of, self._checks, self.exception_handlers)

    def _route_of(self, scope: Scope) -> str:
        """Return the path template of the route that serves a request.

        As in Starlette's router, the route is the first full match, or else the first route with
        the path and another method. The template is empty if no route has the request's path.
        """
        if scope["path"] in self.fast_routes and scope["method"] == "POST":
            return str(scope["path"])
        partial = ""
        for route in self.router.routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return _path_template(route)
            if match is Match.PARTIAL:
                partial = partial or _path_template(route)
        return partial


def _fast_route(endpoint: Endpoint, handlers: ExceptionHandlers) -> ASGIApp:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except Exception as error:  # noqa: BLE001  every way out of an endpoint is a response
            response = await handle_exception(error, request, handlers)
        await response(scope, receive, send)

    return serve


def _path_template(route: BaseRoute) -> str:
    """Return the path template of a route or mount.

    Host routes, which have no template, count as all paths.
    """
    return getattr(route, "path", "") or "/"


def _release_frames(error: Exception) -> None:
    """Release the local variables of the functions that raised an error or its cause.

    A frame of Starlette's task group refers to the error, whose traceback refers to the frame. The
    cycle would keep the data of a failed stream in memory until a full garbage collection.
    """
    for one in (error, error.__cause__):
        if one is not None:
            one.__traceback__ = None


def _is_connection_closed(send: Send) -> bool:
    """Return True if the client's connection is closed.

    uvloop raises at the next write before uvicorn notices the closed connection.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    return transport is not None and transport.is_closing()


def _default_finish_reason(status: int) -> str:
    """Return the finish reason of a request whose endpoint did not set one."""
    return "cancelled" if status in (0, 499) else "error" if status >= 400 else ""
