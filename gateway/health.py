"""/health/live, /health/ready and /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmops.gateway.errors import UnavailableError
from llmops.gateway.observability.metrics import Metrics


class Health:
    """`ready` says None, or in one sentence what is missing. While draining, nothing is ready."""

    def __init__(self, ready: Callable[[], Awaitable[str | None]], metrics: Metrics) -> None:
        self._ready = ready
        self._metrics = metrics
        self.draining = False

    def drain(self) -> None:
        self.draining = True

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        missing = "The gateway is shutting down." if self.draining else await self._ready()
        if missing is not None:
            raise UnavailableError(missing, code="not_ready")
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)
