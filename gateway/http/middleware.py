"""The one door of all endpoints: what looks at every request and hears of every end is a Check in a list.

A check does not change the way that a request takes; the first that refuses is the last that is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import MappingProxyType

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmops.gateway.http.anonymous_caller import anonymous_caller
from llmops.gateway.http.chunked_writer import SERVER_SEND_KEY, WRITE_BATCH_KEY, WriteBatch
from llmops.gateway.http.error_handlers import ExceptionHandlers, handle_exception
from llmops.gateway.http.request_context import CONTEXT_KEY, RequestContext, create_context
from llmops.gateway.interfaces import Outcome
from llmops.gateway.logging_setup import current_request

log = logging.getLogger(__name__)


class Check:
    """What every request must pass, and what hears of every end. Subclasses override one of the two, or both."""

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Raises ApiError to refuse the request. `context.route` says which endpoint is asked, for exemptions; for what
        no route has, there is nothing to refuse and this is not called. May set `context.caller`."""

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        """The request is over: once for each, also for those that were refused or found no route. Must not raise."""


class RequestMiddleware:
    """Plain ASGI: gives each request its context, its answer the standard headers, and has the checks look at it.

    The server's own `send` goes into the scope, for the short path of event streams (chunked.py).
    """

    def __init__(
        self,
        app: ASGIApp,
        route_of: Callable[[Scope], str],
        checks: Sequence[Check] = (),
        handlers: ExceptionHandlers = MappingProxyType({}),
    ) -> None:
        """`handlers`: those of the application for exceptions, by class."""
        self._app, self._route_of, self._handlers = app, route_of, handlers
        self._before = [check.before for check in checks if type(check).before is not Check.before]
        self._after = [check.after for check in checks if type(check).after is not Check.after]
        self._burst = WriteBatch()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = self._enter(scope)
        scope[SERVER_SEND_KEY], scope[WRITE_BATCH_KEY] = send, self._burst
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = dict(context.headers())
                for name in extra.keys() & dict(message["headers"]).keys():
                    del extra[name]
                message["headers"] = [*message["headers"], *extra.items()]
            await send(message)

        try:
            if context.route:
                for before in self._before:
                    await before(scope, context)
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            if status and _is_connection_closed(send):
                context.finish = context.finish or "cancelled"
                return
            if status:
                context.finish = "error"
                raise
            response = await handle_exception(error, Request(scope, receive), self._handlers)
            await response(scope, receive, send_with_headers)
        finally:
            # it belongs to an object of the server that holds this scope: a reference cycle
            scope.pop(SERVER_SEND_KEY, None)
            if context.later is not None:
                context.later.add_done_callback(lambda _: self._tell(context, status))
            else:
                self._tell(context, status)

    def _enter(self, scope: Scope) -> RequestContext:
        given = dict(reversed(scope["headers"]))
        context = scope[CONTEXT_KEY] = create_context(given)
        current_request.set(context.request_id)
        credential = given.get(b"authorization") or given.get(b"x-api-key", b"")
        context.caller = anonymous_caller((scope.get("client") or ("",))[0], credential)
        context.route = self._route_of(scope)
        return context

    def _tell(self, context: RequestContext, status: int) -> None:
        outcome = Outcome(status, context.finish or _default_finish_reason(status), context.usage)
        for after in self._after:
            try:
                after(context, outcome)
            except Exception:
                log.exception("request %s: what hears of its end failed", context.request_id)


def _is_connection_closed(send: Send) -> bool:
    """Whether the client's connection is: uvloop raises at the next write when its server does not know yet."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    return transport is not None and transport.is_closing()


def _default_finish_reason(status: int) -> str:
    """Of what no endpoint told the end."""
    return "cancelled" if status in (0, 499) else "error" if status >= 400 else ""
