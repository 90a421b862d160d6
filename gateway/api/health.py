"""The endpoints of health checks, metrics and the state of replicas.

The routes are /health/live, /health/ready, /metrics and /replicas.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from llmops.background import STATUS_CHECKS_PER_SECOND, SingleFlight
from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.request_context import context_of
from llmops.gateway.interfaces import Caller
from llmops.gateway.routing.model_registry import ModelRegistry
from llmops.gateway.routing.served_models import ModelReadiness
from llmops.gateway.schemas.response_schemas import HealthResponse
from llmops.gateway.telemetry.metrics import GatewayMetrics


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
