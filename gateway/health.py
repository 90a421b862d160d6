"""/health/live, /health/ready and /metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmops.gateway.errors import UnavailableError
from llmops.gateway.observability.combined import OWN, combined
from llmops.gateway.observability.metrics import Metrics

GENERATE_SECONDS = 10.0


class Probes(Protocol):
    """What can be asked of the models: None when all is well, otherwise in one sentence what is missing."""

    async def ready(self) -> str | None: ...

    async def generates(self, seconds: float) -> str | None: ...


class Health:
    """`/health/ready?generate=true` also has every model make a token. While draining, nothing is ready."""

    def __init__(self, probes: Probes, metrics: Metrics, siblings: Sequence[Path] = ()) -> None:
        """`siblings`: Unix sockets of the other workers on the same port."""
        self._probes = probes
        self._metrics = metrics
        self._siblings = siblings
        self.draining = False

    def drain(self) -> None:
        self.draining = True

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        missing = "The gateway is shutting down." if self.draining else await self._probes.ready()
        if missing is None and request.query_params.get("generate", "false").lower() in ("1", "true"):
            missing = await self._probes.generates(GENERATE_SECONDS)
        if missing is not None:
            raise UnavailableError(missing, code="not_ready")
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        siblings = () if OWN in request.query_params else self._siblings
        return Response(await combined(self._metrics.registry, siblings), media_type=CONTENT_TYPE_LATEST)
