"""/health/live, /health/ready and /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.request_context import context_of
from llmops.gateway.http.single_flight import SingleFlight
from llmops.gateway.interfaces import Caller
from llmops.gateway.routing.model_registry import ModelRegistry
from llmops.gateway.routing.served_models import ModelReadiness
from llmops.gateway.telemetry.metrics import GatewayMetrics

GENERATE_TIMEOUT = 10.0
#: Trials per second of one model, and looks at the servers and metrics pages per second, however many clients ask.
GENERATE_CHECKS_PER_SECOND, STATUS_CHECKS_PER_SECOND = 1, 10


class HealthEndpoints:
    """While draining, nothing is ready. One broken model among several does not make the gateway unready.

    `?model=NAME` asks for one model, `?strict=true` for all of them; `generate=true` also has them answer.
    """

    def __init__(self, catalogue: ModelRegistry, metrics: GatewayMetrics) -> None:
        self._catalogue = catalogue
        self._look = SingleFlight(catalogue.look, STATUS_CHECKS_PER_SECOND)
        self._trials: dict[str, SingleFlight[str | None]] = {}
        self._page = SingleFlight(partial(_page, metrics.registry), STATUS_CHECKS_PER_SECOND)
        self.draining = False

    def drain(self) -> None:
        self.draining = True

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        if self.draining:
            raise _not_ready("The gateway is shutting down.")
        standing = await self._look.get()
        caller = context_of(request).caller
        if "inference" not in caller.scopes:
            return _anonymous_readiness(standing)
        standing = _restrict_to_caller(caller, standing)
        broken = dict(standing.broken)
        if _asked(request, "generate"):
            broken.update(await self._silent(_wanted(standing, request.query_params.get("model"))))
        ready = [name for name in standing.ready if name not in broken]
        missing = _missing(request, ready, broken, standing.problem)
        if missing is not None:
            raise _not_ready(missing)
        models = {name: {"ready": True} for name in ready}
        unready = {name: {"ready": False, "problem": problem} for name, problem in broken.items()}
        return JSONResponse({"status": "degraded" if broken else "ready", "models": {**models, **unready}})

    async def _silent(self, names: Sequence[str]) -> dict[str, str]:
        """Return the models that do not answer, and why. Callers share one trial per model and second."""
        problems = {name: await self._trial(name).get() for name in names}
        return {name: problem for name, problem in problems.items() if problem is not None}

    def _trial(self, name: str) -> SingleFlight[str | None]:
        if name not in self._trials:
            self._trials[name] = SingleFlight(
                partial(self._catalogue.generates, name, GENERATE_TIMEOUT), GENERATE_CHECKS_PER_SECOND
            )
        return self._trials[name]

    async def metrics(self, request: Request) -> Response:
        return Response(await self._page.get(), media_type=CONTENT_TYPE_LATEST)


def _anonymous_readiness(standing: ModelReadiness) -> Response:
    """Where keys are asked for, one without a key learns whether, and nothing of which."""
    if all(name in standing.broken for name in standing.ready):
        raise _not_ready("The gateway is not ready; with a key it says why.")
    return JSONResponse({"status": "ready"})


def _restrict_to_caller(caller: Caller, standing: ModelReadiness) -> ModelReadiness:
    if caller.models is None:
        return standing
    ready = {name: serving for name, serving in standing.ready.items() if caller.may_use(name)}
    broken = {name: problem for name, problem in standing.broken.items() if caller.may_use(name)}
    return ModelReadiness(ready, broken, standing.problem)


def _asked(request: Request, name: str) -> bool:
    return request.query_params.get(name, "false").lower() in ("1", "true")


def _wanted(standing: ModelReadiness, model: str | None) -> list[str]:
    """The models to be tried: each once, whatever number of adapters it has."""
    if model is None:
        return sorted(set(standing.ready.values()))
    return [model] if model in standing.ready else []


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


async def _page(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)
