"""The outermost layer: gives each request its context, its answer the standard headers, and counts it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmops.gateway.http.body import Intake
from llmops.gateway.http.context import KEY, RequestContext, new_context
from llmops.gateway.http.failures import bug
from llmops.gateway.logs import current_request
from llmops.gateway.observability.metrics import Metrics

_REQUEST_ID = b"x-request-id"


class ContextMiddleware:
    """Plain ASGI: Starlette's BaseHTTPMiddleware would copy every chunk of a stream through a queue."""

    def __init__(self, app: ASGIApp, metrics: Metrics, intake: Intake) -> None:
        self._app = app
        self._metrics = metrics
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))
        given = headers.get(_REQUEST_ID)
        context = scope[KEY] = new_context(given.decode("latin-1") if given else None)
        current_request.set(context.request_id)
        context.client = (scope.get("client") or ("",))[0]
        context.authorization = headers.get(b"authorization") or headers.get(b"x-api-key", b"")

        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                present = {name for name, _ in message["headers"]}
                extra = [(name.encode(), value.encode()) for name, value in context.headers().items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in present)]
                self._count(scope, message["status"], context)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            if started:
                raise
            await bug(context, error, scope)(scope, receive, send_with_headers)
        finally:
            self._intake.release(context)

    def _count(self, scope: Scope, status: int, context: RequestContext) -> None:
        # only known routes become a label; anything else would let clients grow the metrics at will
        route = getattr(scope.get("route"), "path", "unknown")
        if context.waited:
            overhead = context.overhead
            self._metrics.overhead.labels("total").observe(overhead)
            for stage, seconds in context.all_stages(overhead).items():
                self._metrics.stages.labels(stage).observe(seconds)
        self._metrics.requests.labels(route, str(status)).inc()
