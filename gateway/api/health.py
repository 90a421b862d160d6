"""The endpoints of health checks, metrics and the state of replicas.

The routes are /health/live, /health/ready, /metrics and /replicas.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, Generic, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.request_context import context_of
from llmops.gateway.interfaces import Caller
from llmops.gateway.routing.model_registry import ModelRegistry
from llmops.gateway.routing.served_models import ModelReadiness
from llmops.gateway.schemas.response_schemas import HealthResponse
from llmops.gateway.telemetry.metrics import GatewayMetrics

#: Maximum number of readiness checks of all servers, and of renderings of the metrics page, per
#: second. Bounds the load of both, however many clients ask.
STATUS_CHECKS_PER_SECOND = 10

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """The shared result of an asynchronous function that runs once at a time.

    The function runs at most `per_second` times each second. A caller during a run receives the
    result of that run. A caller beyond `per_second` receives the last result.
    """

    def __init__(self, function: Callable[[], Awaitable[T]], per_second: int) -> None:
        self._function, self._per_second = function, per_second
        self._second, self._left = -1, 0
        self._last: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """Return the result of a run. Errors of the function are raised."""
        second = int(monotonic())
        if second != self._second:
            self._second, self._left = second, self._per_second
        last = self._last
        if last is None or (last.done() and self._left > 0):
            self._left -= 1
            last = self._last = asyncio.ensure_future(self._function())
        # A caller that is cancelled must not cancel the run that other callers wait for.
        return await asyncio.shield(last)


class HealthEndpoints:
    """The endpoints of health checks, metrics and the state of replicas.

    A gateway that is shutting down is not ready. If one model of several is broken, the gateway is
    still ready.

    The query parameter `model=NAME` checks one model, and `strict=true` requires all models to be
    ready.

    Attributes:
        draining: True once the gateway is shutting down.
    """

    def __init__(self, registry: ModelRegistry, metrics: GatewayMetrics) -> None:
        self._registry = registry
        self._readiness = SingleFlight(registry.check_readiness, STATUS_CHECKS_PER_SECOND)
        self._metrics_page = SingleFlight(partial(_render_metrics, metrics.registry), STATUS_CHECKS_PER_SECOND)
        self.draining = False

    def add_routes(self, app: GatewayApp, *, replicas: bool) -> None:
        """Add the routes to `app`, with /replicas if `replicas` is true."""
        app.add_api_route("/health", self.ready, methods=["GET"], include_in_schema=False)
        app.add_endpoint("GET", "/health/live", self.live, "Report that the gateway runs", HealthResponse, tag="health")
        app.add_endpoint(
            "GET", "/health/ready", self.ready, "Report which models are ready", HealthResponse, tag="health"
        )
        tags: dict[str, Any] = {"methods": ["GET"], "tags": ["health"]}
        if replicas:
            app.add_api_route("/replicas", self.replicas, summary="Show the state of this gateway's replicas", **tags)
        app.add_api_route(
            "/metrics", self.metrics, response_class=PlainTextResponse, summary="Show metrics for Prometheus", **tags
        )

    def drain(self) -> None:
        """Report the gateway as not ready from now on, because it is shutting down."""
        self.draining = True

    async def live(self, request: Request) -> Response:
        """Report that the gateway's process runs."""
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """Report which models are ready.

        Raises:
            UnavailableError: None of the requested models is ready, or with `strict` not all of
                them.
        """
        if self.draining:
            raise _not_ready("The gateway is shutting down; send requests to another gateway.")
        readiness = await self._readiness.get()
        caller = context_of(request).caller
        if "inference" not in caller.scopes:
            return _anonymous_readiness(readiness)
        readiness = _restrict_to_caller(caller, readiness)
        broken = readiness.broken
        ready = [name for name in readiness.ready if name not in broken]
        problem = _problem(request, ready, broken, readiness.problem)
        if problem is not None:
            raise _not_ready(problem)
        models = {name: {"ready": True} for name in ready}
        unready = {name: {"ready": False, "problem": problem} for name, problem in broken.items()}
        return JSONResponse({"status": "degraded" if broken else "ready", "models": {**models, **unready}})

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(await self._metrics_page.get(), media_type=CONTENT_TYPE_LATEST)

    async def replicas(self, request: Request) -> Response:
        """Return the state of the gateway's replicas.

        `gateways` is a list, so that the responses of several gateways can be joined.
        """
        gateway = {
            "gateway": f"{socket.gethostname()}/{os.getpid()}",
            "models": self._registry.describe_replicas(),
            "unreached": self._registry.unreachable_servers(),
        }
        return JSONResponse({"gateways": [gateway]})


def _anonymous_readiness(readiness: ModelReadiness) -> Response:
    """Return readiness without model names, for callers without the scope `inference`."""
    if all(name in readiness.broken for name in readiness.ready):
        raise _not_ready("The gateway is not ready. Send an API key to see the reason.")
    return JSONResponse({"status": "ready"})


def _restrict_to_caller(caller: Caller, readiness: ModelReadiness) -> ModelReadiness:
    if caller.models is None:
        return readiness
    ready = [name for name in readiness.ready if caller.may_use(name)]
    broken = {name: problem for name, problem in readiness.broken.items() if caller.may_use(name)}
    return ModelReadiness(ready, broken, readiness.problem)


def _problem(request: Request, ready: Sequence[str], broken: Mapping[str, str], problem: str | None) -> str | None:
    """Return the reason why the requested models are not ready, or None if they are."""
    model, first = request.query_params.get("model"), next(iter(broken.values()), None)
    if model is not None:
        return (
            None
            if model in ready
            else broken.get(model) or problem or f"There is no model {model}; GET /v1/models lists the models."
        )
    if request.query_params.get("strict", "").lower() in ("1", "true") and (first or problem):
        return first or problem
    return None if ready else first or problem or "Triton serves no model; its operator must load one."


def _not_ready(problem: str) -> UnavailableError:
    return UnavailableError(problem, code="not_ready")


async def _render_metrics(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)
