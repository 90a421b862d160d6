"""What all endpoints share, from models to text threads; and the way from engine requests to one token stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmops.gateway.errors import ApiError
from llmops.gateway.fleet.catalogue import Models
from llmops.gateway.fleet.merged import MergedStream
from llmops.gateway.fleet.queues import Queues
from llmops.gateway.fleet.routing.prefix import tenant_salt
from llmops.gateway.fleet.serving import ServedModel
from llmops.gateway.http.body import Intake
from llmops.gateway.http.context import RequestContext
from llmops.gateway.messages import Engine, EngineRequest, TokenStream
from llmops.gateway.observability.goodput import Outcome
from llmops.gateway.observability.metrics import Meter, Metrics
from llmops.gateway.settings import RequestLimits, Timeouts
from llmops.gateway.text.threads import TextThreads

Answered = TypeVar("Answered")
# the code of what is refused for want of a place
OVERLOADED = "overloaded"


@dataclass(frozen=True, slots=True)
class Service:
    """Handed to every endpoint."""

    models: Models[ServedModel]
    limits: RequestLimits
    timeouts: Timeouts
    metrics: Metrics
    text_threads: TextThreads
    intake: Intake
    queues: Queues
    # of an answer whose request names no limit; None: the context's
    default_tokens: int | None = None
    # refuse requests with fields that are not known
    strict_fields: bool = False
    # who shares cached prefixes: `tenant`, or everybody
    cache_scope: str = ""

    def cache_salt(self, caller: str) -> int:
        """Return the number that keeps a caller's cached prefixes apart from other tenants'; 0 if they are shared."""
        return tenant_salt(caller.partition("/")[0]) if self.cache_scope == "tenant" else 0


async def admitted(
    service: Service,
    model: ServedModel,
    sequences: int,
    context: RequestContext,
    start: Callable[[Callable[[], None], Meter], Awaitable[Answered]],
) -> Answered:
    """What `start` makes of a request that has its places: given what gives these back, and the request's meter.

    Raises UnavailableError when too many are waiting. Whatever fails is counted, and has no places any more.
    """
    meter = context.meter = service.metrics.meter(model.name, context.started, context.caller.tier)
    context.model = model.name
    leave = None
    try:
        if model.engine.gated:
            model.engine.check(context.turn)
        leave = service.queues.enter(model, sequences, context.caller.share)
        return await start(leave, meter)
    except BaseException as error:
        if leave is not None:
            leave()
        meter.refused(_outcome(error))
        raise


def _outcome(error: BaseException) -> Outcome | None:
    """Of what failed before there was an answer; None for what the request itself is to blame for."""
    if isinstance(error, ApiError):
        return "shed" if error.code == OVERLOADED else "failed" if error.status >= 500 else None
    return "failed" if isinstance(error, Exception) else "aborted"


async def open_streams(engine: Engine, requests: Sequence[EngineRequest]) -> TokenStream:
    """One stream for one request. Several become one: sequence s of request r is sequence r * n + s."""
    if len(requests) == 1:
        return await engine.open(requests[0])
    streams: list[TokenStream] = []
    try:
        for request in requests:
            streams.append(await engine.open(request))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return MergedStream(streams, range(0, len(streams) * requests[0].n, requests[0].n))
