"""/health/live, /health/ready and /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmops.gateway.errors import UnavailableError
from llmops.gateway.fleet.catalogue import Catalogue
from llmops.gateway.fleet.serving import Standing
from llmops.gateway.http.context import context_of
from llmops.gateway.http.sharing import Shared
from llmops.gateway.messages import Caller
from llmops.gateway.observability.metrics import Metrics

GENERATE_SECONDS = 10.0
#: Trials per second of one model, and looks at the servers and metrics pages per second, however many clients ask.
TRIALS, LOOKS = 1, 10


class Health:
    """While draining, nothing is ready. One broken model among several does not make the gateway unready.

    `?model=NAME` asks for one model, `?strict=true` for all of them; `generate=true` also has them answer.
    """

    def __init__(self, catalogue: Catalogue, metrics: Metrics) -> None:
        self._catalogue = catalogue
        self._look = Shared(catalogue.look, LOOKS)
        self._trials: dict[str, Shared[str | None]] = {}
        self._page = Shared(partial(_page, metrics.registry), LOOKS)
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
            return _said_to_strangers(standing)
        standing = _seen_by(caller, standing)
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

    def _trial(self, name: str) -> Shared[str | None]:
        if name not in self._trials:
            self._trials[name] = Shared(partial(self._catalogue.generates, name, GENERATE_SECONDS), TRIALS)
        return self._trials[name]

    async def metrics(self, request: Request) -> Response:
        return Response(await self._page.get(), media_type=CONTENT_TYPE_LATEST)


def _said_to_strangers(standing: Standing) -> Response:
    """Where keys are asked for, one without a key learns whether, and nothing of which."""
    if all(name in standing.broken for name in standing.ready):
        raise _not_ready("The gateway is not ready; with a key it says why.")
    return JSONResponse({"status": "ready"})


def _seen_by(caller: Caller, standing: Standing) -> Standing:
    if caller.models is None:
        return standing
    ready = {name: serving for name, serving in standing.ready.items() if caller.may_use(name)}
    broken = {name: problem for name, problem in standing.broken.items() if caller.may_use(name)}
    return Standing(ready, broken, standing.problem)


def _asked(request: Request, name: str) -> bool:
    return request.query_params.get(name, "false").lower() in ("1", "true")


def _wanted(standing: Standing, model: str | None) -> list[str]:
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
