"""The gateway as an ASGI application: routes, error handlers, and the life of what they share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from llmops import __version__
from llmops.gateway.api.anthropic.messages import MessagesEndpoints
from llmops.gateway.api.anthropic.schemas import (
    AnthropicErrorResponse,
    CountTokensRequest,
    MessageResponse,
    MessagesRequest,
    TokenCount,
)
from llmops.gateway.api.chat_completions import ChatCompletionsEndpoint
from llmops.gateway.api.completions import CompletionsEndpoint
from llmops.gateway.api.control_routes import add_control_routes
from llmops.gateway.api.conversation_routes import BODIES as CONVERSATION_BODIES
from llmops.gateway.api.conversation_routes import ConversationRoutes
from llmops.gateway.api.embeddings import EmbeddingsEndpoint
from llmops.gateway.api.health import HealthEndpoints
from llmops.gateway.api.models import ModelsEndpoint
from llmops.gateway.api.moderations import ModerationsEndpoint, text_embedder
from llmops.gateway.api.replicas import ReplicasEndpoint
from llmops.gateway.api.rerank import RerankEndpoint
from llmops.gateway.api.responses import ResponsesEndpoints
from llmops.gateway.api.tokenize import DetokenizeRequest, TokenizeEndpoints, TokenizeRequest
from llmops.gateway.auth.authentication import create_authentication
from llmops.gateway.conversations.response_run import RunningResponses
from llmops.gateway.conversations.response_store import MemoryResponses, ResponseStore
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.http.error_handlers import ExceptionHandlers, add_exception_handlers
from llmops.gateway.http.exporters import create_access_log_check, create_trace_check
from llmops.gateway.http.fast_path import FastRoute, GatewayApp
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.openapi import add_body_schemas, route_docs
from llmops.gateway.http.request_body import BodyReader
from llmops.gateway.http.request_counter import RequestCounter
from llmops.gateway.interfaces import Usage
from llmops.gateway.ratelimit.buffered_bytes import BufferedBytes
from llmops.gateway.ratelimit.rate_limit_check import create_limit_check
from llmops.gateway.ratelimit.read_limit import ReadLimit
from llmops.gateway.routing.admission.slo_headers import slo_header_checks
from llmops.gateway.routing.engine_slots import EngineSlots
from llmops.gateway.routing.model_registry import ModelRegistry, create_model_registry
from llmops.gateway.routing.replicas.encoder_registry import create_encoder_registries
from llmops.gateway.routing.replicas.pool_registry import PoolRegistry, create_pool_registry
from llmops.gateway.routing.replicas.replica_metrics import ReplicaMetricsCollector
from llmops.gateway.routing.served_models import EmbeddingModel, EncoderModel, GenerativeModel
from llmops.gateway.safety.policy import create_safety
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.gateway.schemas.completion_request import CompletionRequest
from llmops.gateway.schemas.embedding_request import EmbeddingRequest
from llmops.gateway.schemas.moderation_request import ModerationRequest
from llmops.gateway.schemas.rerank_request import RerankRequest
from llmops.gateway.schemas.response_schemas import (
    ChatCompletion,
    Completion,
    DeletedResponse,
    DetokenizeResponse,
    EmbeddingList,
    ErrorResponse,
    HealthResponse,
    InputItems,
    ModelEntries,
    ModelEntry,
    ModerationResponse,
    RerankResponse,
    ResponseObject,
    TokenizeResponse,
)
from llmops.gateway.schemas.responses_request import ResponsesRequest
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.event_loop_lag import EventLoopMonitor
from llmops.gateway.telemetry.goodput import LatencyObjectives
from llmops.gateway.telemetry.metrics import GatewayMetrics
from llmops.gateway.text.text_thread_pool import TextThreadPool
from llmops.gateway.usage.lazy_billing import create_billing
from llmops.gateway.usage.usage_check import create_usage_check
from llmops.gateway.web.browser_security import OriginCheck, TrustedHostCheck
from llmops.gateway.web.chat_page import add_chat_page

if TYPE_CHECKING:
    from llmops.gateway.usage.billing import Billing

# adds its routes at once; what it returns is entered when the application begins, and left when it ends
Plugin = Callable[[FastAPI], AbstractAsyncContextManager[None]]

_openai_route_docs = partial(route_docs, errors=ErrorResponse)
BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
    *CONVERSATION_BODIES,
)


def create_app(settings: GatewaySettings, checks: Sequence[Check] = (), plugins: Sequence[Plugin] = ()) -> GatewayApp:
    """The application for any ASGI server. Nothing is connected before its lifespan starts.

    `checks` are what every request must pass, in this order, after those that the settings name. `plugins` are what else
    is served here.
    """
    metrics = GatewayMetrics(partial(_objectives, settings))
    text_threads = TextThreadPool(settings.text_threads, settings.limits.preparing)
    holding = BufferedBytes(settings.limits.held_bytes)
    intake = BodyReader(settings.limits, settings.timeouts.body, holding.take)
    fleets = create_pool_registry(settings, metrics)
    teams = create_encoder_registries(settings)
    if fleets is not None:
        teams[GenerativeModel] = fleets
    catalogue = create_model_registry(settings, [settings.triton], teams, metrics.reaches)
    metrics.registry.register(ReplicaMetricsCollector(catalogue, fleets))
    access = create_authentication(settings)
    billing = create_billing(settings)
    limits = create_limit_check(settings, billing)
    usage = create_usage_check(settings, billing)
    tracing, access_log = create_trace_check(settings, metrics), create_access_log_check(settings, metrics)
    tellers = [one for one in (tracing, access_log) if one is not None]
    if usage is not None:
        metrics.numbers(metric_definitions.USAGE_LAG).labels().read = usage.lag

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await catalogue.start()
        if billing is not None:
            await billing.start()
        if limits is not None:
            await limits.gate.limiter.start()
        if usage is not None:
            await usage.start()
        for teller in tellers:
            teller.start()
        lag = EventLoopMonitor(metrics)
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(conversations.lifespan())
                for living in visiting:
                    await stack.enter_async_context(living)
                yield
        finally:
            lag.close()
            await responses.close()
            if safety is not None:
                await safety.close()
            if usage is not None:
                await usage.close()
            if access is not None:
                await access.close()
            if limits is not None:
                await limits.gate.close()
            if billing is not None:
                await billing.close()
            await catalogue.close()
            text_threads.close()
            await asyncio.gather(*(asyncio.to_thread(teller.close) for teller in tellers))

    named = [make(settings) for make in settings.request_checks]
    app = GatewayApp(
        title="llmops gateway",
        version=__version__,
        description="OpenAI's API, and Anthropic's messages, over models on NVIDIA Triton Inference Server.",
        lifespan=lifespan,
        # OpenAI clients do not expect a redirect; they know the API's 404
        redirect_slashes=False,
        checks=[
            holding,
            RequestCounter(metrics),
            *tellers,
            OriginCheck(),
            *([access] if access else []),
            TrustedHostCheck(settings.web.hosts),
            *([tracing.passed("auth")] if tracing and access else []),
            *slo_header_checks(settings),
            *named,
            *checks,
            *([ReadLimit(settings.limits.reads_per_second)] if settings.limits.reads_per_second else []),
            *([limits] if limits else []),
            *([tracing.passed("rate_limit")] if tracing and limits else []),
            *([usage] if usage else []),
        ],
    )
    add_exception_handlers(app)
    generating = catalogue.of(GenerativeModel)
    safety = create_safety(settings.safety, metrics, text_embedder(catalogue.of(EmbeddingModel)))
    service = AppState(
        models=generating,
        limits=settings.limits,
        timeouts=settings.timeouts,
        metrics=metrics,
        text_threads=text_threads,
        intake=intake,
        queues=EngineSlots(settings.limits.queued),
        default_tokens=settings.sampling.max_tokens,
        strict_fields=settings.strict_fields,
        cache_scope=settings.cache_scope or ("tenant" if settings.store else ""),
        safety=safety,
    )
    health = HealthEndpoints(catalogue, metrics)
    app.state.health, app.state.metrics, app.state.service = health, metrics, service
    stored = _create_response_store(settings)
    conversations = ConversationRoutes(settings, service, stored, _price_function(billing))
    responses = ResponsesEndpoints(
        service, RunningResponses(stored), conversations.store, settings.conversations.stores
    )
    conversations.add_to(app)
    _add_openai_routes(app, service, catalogue, fleets, responses)
    _add_anthropic_routes(app, service)
    if safety is not None:
        moderations = _openai_route_docs("Judge texts", ModerationResponse, tag="openai", body=ModerationRequest)
        app.router.post("/v1/moderations", **moderations)(ModerationsEndpoint(service, safety).handle)
    app.express = dict(_fast_routes(app.router, app.exception_handlers))
    live = _openai_route_docs("Say that the gateway runs", HealthResponse, tag="health")
    ready = _openai_route_docs("Say whether models can be used", HealthResponse, tag="health")
    add_chat_page(app)
    app.add_api_route("/health", health.ready, methods=["GET"], include_in_schema=False)
    app.add_api_route("/health/live", health.live, methods=["GET"], **live)
    app.add_api_route("/health/ready", health.ready, methods=["GET"], **ready)
    if fleets is not None:
        shown: dict[str, Any] = {"summary": "Show what this gateway knows of its replicas", "tags": ["health"]}
        replicas = ReplicasEndpoint(catalogue)
        app.add_api_route("/replicas", replicas.handle, methods=["GET"], **shown)
    scraped: dict[str, Any] = {"summary": "Show metrics for Prometheus", "tags": ["health"]}
    app.add_api_route("/metrics", health.metrics, methods=["GET"], response_class=PlainTextResponse, **scraped)
    add_body_schemas(app, BODIES)
    visiting = [guest(app) for guest in plugins]
    if settings.store is not None and not plugins:
        add_control_routes(app)
    return app


def _create_response_store(settings: GatewaySettings) -> ResponseStore:
    if settings.store is None:
        return MemoryResponses(settings.responses)
    from llmops.gateway.conversations.sql_responses import SqlResponses

    return SqlResponses(settings.store, settings.responses)


def _price_function(billing: Billing | None) -> Callable[[str, Usage], int | None]:
    def price(model: str, usage: Usage) -> int | None:
        bill = billing.bill(model, usage) if billing is not None else None
        return None if bill is None or bill.price_id is None else bill.micros

    return price


def _objectives(settings: GatewaySettings, model: str) -> LatencyObjectives:
    slo = settings.slo_of(model)
    return LatencyObjectives(slo.ttft_p95, slo.tpot_p95)


def _fast_routes(router: APIRouter, handlers: ExceptionHandlers) -> Iterator[tuple[str, FastRoute]]:
    for route in router.routes:
        if isinstance(route, APIRoute) and route.methods == {"POST"} and not route.param_convertors:
            yield route.path, FastRoute(route.endpoint, handlers)


def _add_openai_routes(
    app: FastAPI,
    service: AppState,
    catalogue: ModelRegistry,
    fleets: PoolRegistry | None,
    responses: ResponsesEndpoints,
) -> None:
    models = ModelsEndpoint(service, catalogue, fleets)
    embeddings = EmbeddingsEndpoint(service, catalogue.of(EmbeddingModel))
    # abstract: whatever there is of its kinds
    rerank = RerankEndpoint(service, catalogue.of(EncoderModel))  # type: ignore[type-abstract]
    tokens = TokenizeEndpoints(service)
    chat, completions = ChatCompletionsEndpoint(service), CompletionsEndpoint(service)
    routes = (
        ("/v1/chat/completions", chat.handle, "Create a chat completion", ChatRequest, ChatCompletion, "openai"),
        ("/v1/completions", completions.handle, "Create a completion", CompletionRequest, Completion, "openai"),
        ("/v1/responses", responses.create, "Create a response", ResponsesRequest, ResponseObject, "openai"),
        ("/v1/embeddings", embeddings.handle, "Create embeddings", EmbeddingRequest, EmbeddingList, "openai"),
        ("/v1/rerank", rerank.handle, "Rerank documents", RerankRequest, RerankResponse, "rerank"),
        ("/v2/rerank", rerank.handle, "Rerank documents (Cohere v2)", RerankRequest, RerankResponse, "rerank"),
        ("/rerank", rerank.handle, "Rerank documents (Jina, vLLM)", RerankRequest, RerankResponse, "rerank"),
        ("/tokenize", tokens.tokenize, "Turn a prompt into token ids", TokenizeRequest, TokenizeResponse, "tokens"),
        ("/detokenize", tokens.detokenize, "Turn token ids into text", DetokenizeRequest, DetokenizeResponse, "tokens"),
    )
    router = app.router
    for path, handle, summary, body, answer, tag in routes:
        streams = "stream" in body.model_fields
        router.post(path, **_openai_route_docs(summary, answer, tag=tag, body=body, streams=streams))(handle)
    one, stored = {"response_id": "The response's id."}, "/v1/responses/{response_id}"
    again: dict[str, tuple[dict[str, Any], str]] = {
        "stream": ({"type": "boolean"}, "Send its events again."),
        "starting_after": ({"type": "integer", "minimum": 0}, "Send the events after this number; needs stream."),
    }
    get = _openai_route_docs("Get a response", ResponseObject, tag="openai", path=one, query=again, streams=True)
    delete = _openai_route_docs("Delete a response", DeletedResponse, tag="openai", path=one)
    cancel = _openai_route_docs("Cancel a response", ResponseObject, tag="openai", path=one)
    items = _openai_route_docs("List a response's input", InputItems, tag="openai", path=one)
    router.get(stored, **get)(responses.get)
    router.delete(stored, **delete)(responses.delete)
    router.post(f"{stored}/cancel", **cancel)(responses.cancel)
    router.get(f"{stored}/input_items", **items)(responses.input_items)
    router.get("/v1/models", **_openai_route_docs("List models", ModelEntries, tag="openai"))(models.handle)
    named = _openai_route_docs("Show a model", ModelEntry, tag="openai", path={"model": "The model's name."})
    router.get("/v1/models/{model:path}", **named)(models.handle_one)


def _add_anthropic_routes(app: FastAPI, service: AppState) -> None:
    messages, router = MessagesEndpoints(service), app.router
    create = route_docs(
        "Create a message",
        MessageResponse,
        tag="anthropic",
        body=MessagesRequest,
        streams=True,
        errors=AnthropicErrorResponse,
    )
    count = route_docs(
        "Count a message's tokens", TokenCount, tag="anthropic", body=CountTokensRequest, errors=AnthropicErrorResponse
    )
    router.post("/v1/messages", **create)(messages.create)
    router.post("/v1/messages/count_tokens", **count)(messages.count_tokens)
