"""What all endpoints share, from models to text threads; and the way from engine requests to one token stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from llmops.gateway.errors import OVERLOADED, ApiError, ModelNotFoundError, UnavailableError
from llmops.gateway.http.request_body import BodyReader
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Engine, EngineRequest, TokenStream
from llmops.gateway.routing.engine_slots import EngineSlots
from llmops.gateway.routing.merged_stream import MergedStream
from llmops.gateway.routing.model_registry import ModelLookup
from llmops.gateway.routing.placement.prefix_index import tenant_cache_salt
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.safety.policy import Safety
from llmops.gateway.settings import RequestLimits, Timeouts
from llmops.gateway.telemetry.metrics import AnswerMeter, GatewayMetrics, GoodputOutcome
from llmops.gateway.text.text_thread_pool import TextThreadPool

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class AppState:
    """Handed to every endpoint."""

    models: ModelLookup[GenerativeModel]
    limits: RequestLimits
    timeouts: Timeouts
    metrics: GatewayMetrics
    text_threads: TextThreadPool
    intake: BodyReader
    queues: EngineSlots
    # of an answer whose request names no limit; None: the context's
    default_tokens: int | None = None
    # refuse requests with fields that are not known
    strict_fields: bool = False
    # who shares cached prefixes: `tenant`, or everybody
    cache_scope: str = ""
    # leave out listed blocks of agents that differ in each session, so that the rest of a prompt is found in the cache
    drop_session_blocks: bool = True
    # filters of prompts and answers; None without any
    safety: Safety | None = None

    def find_model(self, name: str, context: RequestContext) -> GenerativeModel:
        """Return the model that answers a request for `name`.

        An alias is answered by the first of its models that is served and has room; the last one is taken as it is.

        Raises:
            ModelNotAllowedError, ModelNotFoundError, UnavailableError: As `ModelLookup.get`.
        """
        *others, last = self.models.candidates(name, context.caller)
        for one in others:
            with suppress(UnavailableError, ModelNotFoundError):
                model = self.models.find(one)
                if model.engine.gated:
                    model.engine.check(context.scheduling)
                self.queues.enter(model, 1, context.caller.share)()
                context.alias_of = model.name
                return model
        model = self.models.find(last)
        context.alias_of = model.name if name != model.name and model.name == last else ""
        return model

    def cache_salt(self, caller: str) -> int:
        """Return the number that keeps a caller's cached prefixes apart from other tenants'; 0 if they are shared."""
        return tenant_cache_salt(caller.partition("/")[0]) if self.cache_scope == "tenant" else 0


async def admit(
    service: AppState,
    model: GenerativeModel,
    sequences: int,
    context: RequestContext,
    start: Callable[[Callable[[], None], AnswerMeter], Awaitable[ResultT]],
) -> ResultT:
    """What `start` makes of a request that has its places: given what gives these back, and the request's meter.

    Raises UnavailableError when too many are waiting. Whatever fails is counted, and has no places any more.
    """
    meter = context.meter = service.metrics.meter(model.name, context.started, context.caller.tier)
    context.model = model.name
    leave = None
    try:
        if model.engine.gated:
            model.engine.check(context.scheduling)
        leave = service.queues.enter(model, sequences, context.caller.share)
        return await start(leave, meter)
    except BaseException as error:
        if leave is not None:
            leave()
        meter.refused(_failure_outcome(error))
        raise


def _failure_outcome(error: BaseException) -> GoodputOutcome | None:
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
