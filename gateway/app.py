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
from llmops.gateway.answers.service import Service
from llmops.gateway.callers.access.check import access_of
from llmops.gateway.callers.holding import Holding
from llmops.gateway.callers.limits.check import limits_of
from llmops.gateway.callers.limits.reads import ReadLimit
from llmops.gateway.callers.usage.bind import billing_of
from llmops.gateway.callers.usage.check import usage_of
from llmops.gateway.conversations.run import Running
from llmops.gateway.conversations.store import MemoryResponses, ResponseStore
from llmops.gateway.endpoints.chat import ChatCompletions
from llmops.gateway.endpoints.completions import Completions
from llmops.gateway.endpoints.conversation_routes import BODIES as CONVERSATION_BODIES
from llmops.gateway.endpoints.conversation_routes import ConversationRoutes
from llmops.gateway.endpoints.elsewhere import add_elsewhere
from llmops.gateway.endpoints.embeddings import Embeddings
from llmops.gateway.endpoints.health import Health
from llmops.gateway.endpoints.messages.endpoint import Messages
from llmops.gateway.endpoints.messages.wire import (
    CountTokensRequest,
    MessageAnswer,
    MessageError,
    MessagesRequest,
    TokenCount,
)
from llmops.gateway.endpoints.models import ModelList
from llmops.gateway.endpoints.replicas import Replicas
from llmops.gateway.endpoints.rerank import Rerank
from llmops.gateway.endpoints.responses import Responses
from llmops.gateway.endpoints.tokens import DetokenizeRequest, TokenizeRequest, Tokens
from llmops.gateway.fleet.admission.hints import hints_of
from llmops.gateway.fleet.catalogue import Catalogue, catalogue_of
from llmops.gateway.fleet.queues import Queues
from llmops.gateway.fleet.replicas.census import Census
from llmops.gateway.fleet.replicas.encoders import encoders_of
from llmops.gateway.fleet.replicas.team import Fleets, fleets_of
from llmops.gateway.fleet.serving import EmbeddingModel, Encoder, ServedModel
from llmops.gateway.http.body import Intake
from llmops.gateway.http.counting import RequestCounts
from llmops.gateway.http.door import Check
from llmops.gateway.http.express import Endpoint, ExpressApp
from llmops.gateway.http.failures import Handlers, add_handlers
from llmops.gateway.http.openapi import add_bodies, documented
from llmops.gateway.http.telling import access_log_of, tracing_of
from llmops.gateway.messages import Usage
from llmops.gateway.observability import names
from llmops.gateway.observability.goodput import Objectives
from llmops.gateway.observability.lag import LagWatch
from llmops.gateway.observability.metrics import Metrics
from llmops.gateway.openai.answers import (
    ChatCompletion,
    Completion,
    DeletedResponse,
    DetokenizeAnswer,
    EmbeddingList,
    ErrorAnswer,
    HealthAnswer,
    InputItems,
    ModelEntries,
    ModelEntry,
    RerankAnswer,
    ResponseAnswer,
    TokenizeAnswer,
)
from llmops.gateway.openai.chat import ChatRequest
from llmops.gateway.openai.completions import CompletionRequest
from llmops.gateway.openai.embeddings import EmbeddingRequest
from llmops.gateway.openai.rerank import RerankRequest
from llmops.gateway.openai.responses import ResponsesRequest
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.text.threads import TextThreads
from llmops.gateway.web.browser import BrowserCheck, HostCheck
from llmops.gateway.web.page import add_page

if TYPE_CHECKING:
    from llmops.gateway.callers.usage.cost import Billing

# adds its routes at once; what it returns is entered when the application begins, and left when it ends
Guest = Callable[[FastAPI], AbstractAsyncContextManager[None]]

_openais = partial(documented, errors=ErrorAnswer)
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


def create_app(settings: GatewaySettings, checks: Sequence[Check] = (), guests: Sequence[Guest] = ()) -> ExpressApp:
    """The application for any ASGI server. Nothing is connected before its lifespan starts.

    `checks` are what every request must pass, in this order, after those that the settings name. `guests` are what else
    is served here.
    """
    metrics = Metrics(partial(_objectives, settings))
    text_threads = TextThreads(settings.text_threads, settings.limits.preparing)
    holding = Holding(settings.limits.held_bytes)
    intake = Intake(settings.limits, settings.timeouts.body, holding.take)
    fleets = fleets_of(settings, metrics)
    teams = encoders_of(settings)
    if fleets is not None:
        teams[ServedModel] = fleets
    catalogue = catalogue_of(settings, [settings.triton], teams, metrics.reaches)
    metrics.registry.register(Census(catalogue, fleets))
    access = access_of(settings)
    billing = billing_of(settings)
    limits = limits_of(settings, billing)
    usage = usage_of(settings, billing)
    tracing, access_log = tracing_of(settings, metrics), access_log_of(settings, metrics)
    tellers = [one for one in (tracing, access_log) if one is not None]
    if usage is not None:
        metrics.numbers(names.USAGE_LAG).labels().read = usage.lag

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
        lag = LagWatch(metrics)
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(conversations.lifespan())
                for living in visiting:
                    await stack.enter_async_context(living)
                yield
        finally:
            lag.close()
            await responses.close()
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
    app = ExpressApp(
        title="llmops gateway",
        version=__version__,
        description="OpenAI's API, and Anthropic's messages, over models on NVIDIA Triton Inference Server.",
        lifespan=lifespan,
        # OpenAI clients do not expect a redirect; they know the API's 404
        redirect_slashes=False,
        checks=[
            holding,
            RequestCounts(metrics),
            *tellers,
            BrowserCheck(),
            *([access] if access else []),
            HostCheck(settings.web.hosts),
            *([tracing.passed("auth")] if tracing and access else []),
            *hints_of(settings),
            *named,
            *checks,
            *([ReadLimit(settings.limits.reads_per_second)] if settings.limits.reads_per_second else []),
            *([limits] if limits else []),
            *([tracing.passed("rate_limit")] if tracing and limits else []),
            *([usage] if usage else []),
        ],
    )
    add_handlers(app)
    generating = catalogue.of(ServedModel)
    service = Service(
        models=generating,
        limits=settings.limits,
        timeouts=settings.timeouts,
        metrics=metrics,
        text_threads=text_threads,
        intake=intake,
        queues=Queues(settings.limits.queued),
        default_tokens=settings.sampling.max_tokens,
        strict_fields=settings.strict_fields,
        cache_scope=settings.cache_scope or ("tenant" if settings.store else ""),
    )
    health = Health(catalogue, metrics)
    app.state.health, app.state.metrics, app.state.service = health, metrics, service
    stored = _responses_of(settings)
    conversations = ConversationRoutes(settings, service, stored, _price_of(billing))
    responses = Responses(service, Running(stored), conversations.store, settings.conversations.stores)
    conversations.add_to(app)
    _add_openai_routes(app, service, catalogue, fleets, responses)
    _add_anthropic_routes(app, service)
    app.express = dict(_posts(app.router, app.exception_handlers))
    live = _openais("Say that the gateway runs", HealthAnswer, tag="health")
    ready = _openais("Say whether models can be used", HealthAnswer, tag="health")
    add_page(app)
    app.add_api_route("/health", health.ready, methods=["GET"], include_in_schema=False)
    app.add_api_route("/health/live", health.live, methods=["GET"], **live)
    app.add_api_route("/health/ready", health.ready, methods=["GET"], **ready)
    if fleets is not None:
        shown: dict[str, Any] = {"summary": "Show what this gateway knows of its replicas", "tags": ["health"]}
        replicas = Replicas(catalogue)
        app.add_api_route("/replicas", replicas.handle, methods=["GET"], **shown)
    scraped: dict[str, Any] = {"summary": "Show metrics for Prometheus", "tags": ["health"]}
    app.add_api_route("/metrics", health.metrics, methods=["GET"], response_class=PlainTextResponse, **scraped)
    add_bodies(app, BODIES)
    visiting = [guest(app) for guest in guests]
    if settings.store is not None and not guests:
        add_elsewhere(app)
    return app


def _responses_of(settings: GatewaySettings) -> ResponseStore:
    if settings.store is None:
        return MemoryResponses(settings.responses)
    from llmops.gateway.conversations.sql import SqlResponses

    return SqlResponses(settings.store, settings.responses)


def _price_of(billing: Billing | None) -> Callable[[str, Usage], int | None]:
    def price(model: str, usage: Usage) -> int | None:
        bill = billing.bill(model, usage) if billing is not None else None
        return None if bill is None or bill.price_id is None else bill.micros

    return price


def _objectives(settings: GatewaySettings, model: str) -> Objectives:
    slo = settings.slo_of(model)
    return Objectives(slo.ttft_p95, slo.tpot_p95)


def _posts(router: APIRouter, handlers: Handlers) -> Iterator[tuple[str, Endpoint]]:
    for route in router.routes:
        if isinstance(route, APIRoute) and route.methods == {"POST"} and not route.param_convertors:
            yield route.path, Endpoint(route.endpoint, handlers)


def _add_openai_routes(
    app: FastAPI, service: Service, catalogue: Catalogue, fleets: Fleets | None, responses: Responses
) -> None:
    models = ModelList(service, catalogue, fleets)
    embeddings = Embeddings(service, catalogue.of(EmbeddingModel))
    # abstract: whatever there is of its kinds
    rerank = Rerank(service, catalogue.of(Encoder))  # type: ignore[type-abstract]
    tokens = Tokens(service)
    chat, completions = ChatCompletions(service), Completions(service)
    routes = (
        ("/v1/chat/completions", chat.handle, "Create a chat completion", ChatRequest, ChatCompletion, "openai"),
        ("/v1/completions", completions.handle, "Create a completion", CompletionRequest, Completion, "openai"),
        ("/v1/responses", responses.create, "Create a response", ResponsesRequest, ResponseAnswer, "openai"),
        ("/v1/embeddings", embeddings.handle, "Create embeddings", EmbeddingRequest, EmbeddingList, "openai"),
        ("/v1/rerank", rerank.handle, "Rerank documents", RerankRequest, RerankAnswer, "rerank"),
        ("/v2/rerank", rerank.handle, "Rerank documents (Cohere v2)", RerankRequest, RerankAnswer, "rerank"),
        ("/rerank", rerank.handle, "Rerank documents (Jina, vLLM)", RerankRequest, RerankAnswer, "rerank"),
        ("/tokenize", tokens.tokenize, "Turn a prompt into token ids", TokenizeRequest, TokenizeAnswer, "tokens"),
        ("/detokenize", tokens.detokenize, "Turn token ids into text", DetokenizeRequest, DetokenizeAnswer, "tokens"),
    )
    router = app.router
    for path, handle, summary, body, answer, tag in routes:
        streams = "stream" in body.model_fields
        router.post(path, **_openais(summary, answer, tag=tag, body=body, streams=streams))(handle)
    one, stored = {"response_id": "The response's id."}, "/v1/responses/{response_id}"
    again: dict[str, tuple[dict[str, Any], str]] = {
        "stream": ({"type": "boolean"}, "Send its events again."),
        "starting_after": ({"type": "integer", "minimum": 0}, "Send the events after this number; needs stream."),
    }
    get = _openais("Get a response", ResponseAnswer, tag="openai", path=one, query=again, streams=True)
    delete = _openais("Delete a response", DeletedResponse, tag="openai", path=one)
    cancel = _openais("Cancel a response", ResponseAnswer, tag="openai", path=one)
    items = _openais("List a response's input", InputItems, tag="openai", path=one)
    router.get(stored, **get)(responses.get)
    router.delete(stored, **delete)(responses.delete)
    router.post(f"{stored}/cancel", **cancel)(responses.cancel)
    router.get(f"{stored}/input_items", **items)(responses.input_items)
    router.get("/v1/models", **_openais("List models", ModelEntries, tag="openai"))(models.handle)
    named = _openais("Show a model", ModelEntry, tag="openai", path={"model": "The model's name."})
    router.get("/v1/models/{model:path}", **named)(models.handle_one)


def _add_anthropic_routes(app: FastAPI, service: Service) -> None:
    messages, router = Messages(service), app.router
    create = documented(
        "Create a message", MessageAnswer, tag="anthropic", body=MessagesRequest, streams=True, errors=MessageError
    )
    count = documented(
        "Count a message's tokens", TokenCount, tag="anthropic", body=CountTokensRequest, errors=MessageError
    )
    router.post("/v1/messages", **create)(messages.create)
    router.post("/v1/messages/count_tokens", **count)(messages.count_tokens)
