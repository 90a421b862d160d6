"""/health/live, /health/ready and /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmops.gateway.errors import UnavailableError
from llmops.gateway.fleet.serving import Standing
from llmops.gateway.observability.combined import OWN, combined
from llmops.gateway.observability.metrics import Metrics

GENERATE_SECONDS = 10.0


class Probes(Protocol):
    """What can be asked of models."""

    async def look(self) -> Standing: ...

    async def generates(self, name: str, seconds: float) -> str | None:
        """None when the model has just answered, otherwise in one sentence why it has not."""
        ...


class Health:
    """While draining, nothing is ready. One broken model among several does not make the gateway unready.

    `?model=NAME` asks for one model, `?strict=true` for all of them; `generate=true` also has them answer.
    """

    def __init__(self, probes: Sequence[Probes], metrics: Metrics, siblings: Sequence[Path] = ()) -> None:
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
        if self.draining:
            raise _not_ready("The gateway is shutting down.")
        found = [(probe, await probe.look()) for probe in self._probes]
        broken = {name: problem for _, standing in found for name, problem in standing.broken.items()}
        if _asked(request, "generate"):
            for probe, standing in found:
                broken.update(await _silent(probe, _wanted(standing, request.query_params.get("model"))))
        ready = [name for _, standing in found for name in standing.ready if name not in broken]
        problem = next((standing.problem for _, standing in found if standing.problem), None)
        missing = _missing(request, ready, broken, problem)
        if missing is not None:
            raise _not_ready(missing)
        models = {name: {"ready": True} for name in ready}
        unready = {name: {"ready": False, "problem": problem} for name, problem in broken.items()}
        return JSONResponse({"status": "degraded" if broken else "ready", "models": {**models, **unready}})

    async def metrics(self, request: Request) -> Response:
        siblings = () if OWN in request.query_params else self._siblings
        return Response(await combined(self._metrics.registry, siblings), media_type=CONTENT_TYPE_LATEST)


def _asked(request: Request, name: str) -> bool:
    return request.query_params.get(name, "false").lower() in ("1", "true")


def _wanted(standing: Standing, model: str | None) -> list[str]:
    """The models to be tried: each once, whatever number of adapters it has."""
    if model is None:
        return sorted(set(standing.ready.values()))
    return [model] if model in standing.ready else []


async def _silent(probe: Probes, names: Sequence[str]) -> dict[str, str]:
    """Those that do not answer, and why."""
    problems = {name: await probe.generates(name, GENERATE_SECONDS) for name in names}
    return {name: problem for name, problem in problems.items() if problem is not None}


def _missing(request: Request, ready: Sequence[str], broken: Mapping[str, str], problem: str | None) -> str | None:
    """What keeps the answer from being yes; None if nothing does."""
    model, first = request.query_params.get("model"), next(iter(broken.values()), None)
    if model is not None:
        return None if model in ready else broken.get(model) or problem or f"There is no model {model}."
    if _asked(request, "strict") and (first or problem):
        return first or problem
    return None if ready else first or problem or "Triton serves no model."


def _not_ready(missing: str) -> UnavailableError:
    return UnavailableError(missing, code="not_ready")
