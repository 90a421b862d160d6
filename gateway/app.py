"""The gateway as an ASGI application: its components, checks, routes, start-up and shutdown."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from llmops import __version__
from llmops.background import PeriodicTask
from llmops.gateway.api.anthropic.messages import MessagesEndpoints
from llmops.gateway.api.chat_completions import ChatCompletionsEndpoint
from llmops.gateway.api.completions import CompletionsEndpoint
from llmops.gateway.api.conversation_routes import ConversationRoutes
from llmops.gateway.api.embeddings import EmbeddingsEndpoint
from llmops.gateway.api.health import HealthEndpoints
from llmops.gateway.api.models import ModelsEndpoint
from llmops.gateway.api.moderations import ModerationsEndpoint, text_embedder
from llmops.gateway.api.rerank import RerankEndpoint
from llmops.gateway.api.responses import ResponsesEndpoints
from llmops.gateway.api.tokenize import TokenizeEndpoints
from llmops.gateway.auth.authentication import create_audit, create_authentication
from llmops.gateway.conversations.response_store import MemoryResponses, ResponseStore
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.chat_generation import answer_message
from llmops.gateway.http.error_handlers import add_exception_handlers
from llmops.gateway.http.middleware import Check, GatewayApp
from llmops.gateway.http.request_body import BodyReader
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.http.telemetry_checks import (
    ExportingCheck,
    RequestCounter,
    create_access_log_check,
    create_trace_check,
)
from llmops.gateway.interfaces import Caller, Usage
from llmops.gateway.ratelimit.buffered_bytes import BufferedBytes
from llmops.gateway.ratelimit.rate_limit_check import create_limit_check
from llmops.gateway.ratelimit.read_limit import ReadLimit
from llmops.gateway.ratelimit.slots import FairSlots
from llmops.gateway.routing.admission.degradation import Degradation, create_degradation
from llmops.gateway.routing.admission.request_queue import DEFAULT_TIER_NAME
from llmops.gateway.routing.admission.slo_headers import slo_header_checks
from llmops.gateway.routing.auto_model import AutoModel
from llmops.gateway.routing.engine_slots import EngineSlots
from llmops.gateway.routing.model_registry import create_model_registry
from llmops.gateway.routing.providers import Providers
from llmops.gateway.routing.quality.quality_watch import QualityWatch, ScoreCallback, ShadowSample
from llmops.gateway.routing.replicas.encoder_registry import create_encoder_registries
from llmops.gateway.routing.replicas.pool_registry import create_pool_registry
from llmops.gateway.routing.replicas.replica_metrics import ReplicaMetricsCollector
from llmops.gateway.routing.served_models import EmbeddingModel, EncoderModel, GenerativeModel
from llmops.gateway.routing.versions.outcome_check import OutcomeCheck
from llmops.gateway.routing.versions.version_router import VersionRouter
from llmops.gateway.safety.filters import JUDGED_TENANT
from llmops.gateway.safety.policy import create_safety
from llmops.gateway.safety.services import Embed
from llmops.gateway.settings import GatewaySettings, RoutedAlias
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.event_loop_lag import EventLoopMonitor
from llmops.gateway.telemetry.metrics import GatewayMetrics
from llmops.gateway.text.text_thread_pool import TextThreadPool
from llmops.gateway.usage.usage_check import create_billing, create_usage_check
from llmops.gateway.web.browser_security import OriginCheck, TrustedHostCheck
from llmops.gateway.web.pages import add_pages
from llmops.objectives import Objective

if TYPE_CHECKING:
    from llmops.gateway.conversations.checkpoints import CheckpointStore
    from llmops.gateway.routing.versions.version_directory import VersionDirectory
    from llmops.gateway.usage.billing import Billing

#: A function that adds routes to the application. The context manager that the function returns is
#: entered at start-up and left at shutdown.
Plugin = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(settings: GatewaySettings, checks: Sequence[Check] = (), plugins: Sequence[Plugin] = ()) -> GatewayApp:
    """Create the application for any ASGI server. Nothing is connected before its lifespan starts.

    Args:
        settings: The gateway's settings.
        checks: Further checks of every request, which run after the checks that the settings
            create.
        plugins: Functions that add routes of other packages, such as `llmops control`.
    """
    metrics = GatewayMetrics(partial(_objectives, settings))
    text_threads = TextThreadPool(settings.text_threads, settings.limits.preparing)
    buffered_bytes = BufferedBytes(settings.limits.held_bytes)
    versions = _create_version_directory(settings)
    degradation = create_degradation(settings, metrics)
    shadow = ShadowSample(settings.quality.shadow)
    on_prompt = shadow.record if settings.quality.shadow else None
    pools = create_pool_registry(settings, metrics, versions, degradation, on_prompt)
    watch = None
    if pools is not None and settings.quality.interval is not None:
        on_scores = _score_recorder(versions) if versions is not None else None
        quality = QualityWatch(settings.quality, pools, metrics, shadow, on_scores)
        watch = PeriodicTask("quality watch", quality.sweep, settings.quality.interval)
    registries = create_encoder_registries(settings)
    if pools is not None:
        registries[GenerativeModel] = pools
    resolver = versions.resolver if versions is not None else None
    models = create_model_registry(settings, [settings.triton], registries, metrics.reaches, resolver)
    metrics.registry.register(ReplicaMetricsCollector(models, pools))
    authentication = create_authentication(settings)
    billing = create_billing(settings)
    limits = create_limit_check(settings, billing)
    usage = create_usage_check(settings, billing)
    if usage is not None:
        metrics.numbers(metric_definitions.USAGE_LAG).labels().read = usage.lag
        if billing is not None:
            billing.undelivered = usage.undelivered
    traces, access_log = create_trace_check(settings, metrics), create_access_log_check(settings, metrics)
    exporters: list[ExportingCheck] = [check for check in (traces, access_log) if check is not None]
    findings = create_audit(settings.store) if settings.store is not None and settings.safety.filters else None

    async def ask_guard(model: str, message: str, max_tokens: int) -> str:
        # A guard's request is not filtered, because a filter must not judge its own request. It has
        # its own share of the slots, so that a caller cannot use up the guard's slots, and cached
        # prefixes per tenant.
        caller = Caller(share=f"guard of {JUDGED_TENANT.get()}")
        context = RequestContext(f"req_{secrets.token_hex(16)}", caller=caller, work_bytes=len(message))
        return await answer_message(replace(service, safety=None), model, message, max_tokens, context)

    safety = create_safety(settings.safety, metrics, text_embedder(models.of(EmbeddingModel)), ask_guard, findings)
    providers = Providers(settings)
    service = AppState(
        models=models.of(GenerativeModel),
        limits=settings.limits,
        timeouts=settings.timeouts,
        metrics=metrics,
        text_threads=text_threads,
        intake=BodyReader(settings.limits, settings.timeouts.body, buffered_bytes.take, FairSlots(1).slot),
        engine_slots=EngineSlots(settings.limits.queued),
        default_tokens=settings.sampling.max_tokens,
        strict_fields=settings.strict_fields,
        tiers=tuple(settings.tiers),
        drop_session_blocks=settings.drop_session_blocks,
        tenants_apart=settings.tenants_apart,
        safety=safety,
        version_router=VersionRouter(versions, pools) if versions is not None and pools is not None else None,
        degradation=degradation,
        auto_model=_create_auto_model(settings, text_embedder(models.of(EmbeddingModel)), degradation),
        providers=providers,
    )
    stored_responses = _create_response_store(settings)
    checkpoints = _create_checkpoints(settings)
    if usage is not None and checkpoints is not None:
        usage.find_owners = checkpoints.usage_owners
    adopting = [check for check in (authentication, limits, usage) if check is not None]
    conversations = ConversationRoutes(
        settings, service, stored_responses, _price_function(billing), checkpoints, adopting
    )
    responses = ResponsesEndpoints(
        service, stored_responses, conversations.chats, conversations.store, settings.conversations.stores
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            # Components are closed in the reverse of this order, also if start-up fails.
            stack.push_async_callback(_close_in_threads, exporters)
            stack.callback(text_threads.close)
            stack.push_async_callback(models.close)
            if versions is not None:
                versions.on_change = models.refresh_soon
                stack.push_async_callback(versions.close)
                await versions.start()
            await models.start()
            if watch is not None:
                stack.push_async_callback(watch.close)
                await watch.start()
            if billing is not None:
                stack.push_async_callback(billing.close)
                await billing.start()
            if limits is not None:
                stack.push_async_callback(limits.rate_limits.close)
                await limits.rate_limits.limiter.start()
            if authentication is not None:
                stack.push_async_callback(authentication.close)
            if usage is not None:
                stack.push_async_callback(usage.close)
                await usage.start()
            for exporter in exporters:
                exporter.start()
            stack.push_async_callback(providers.close)
            if safety is not None:
                stack.push_async_callback(safety.close)
            if findings is not None:
                stack.push_async_callback(findings.close)
            stack.push_async_callback(responses.close)
            stack.callback(EventLoopMonitor(metrics).close)
            await stack.enter_async_context(conversations.lifespan())
            for plugin in plugin_lifespans:
                await stack.enter_async_context(plugin)
            yield

    app = GatewayApp(
        title="llmops gateway",
        version=__version__,
        description="OpenAI's API and Anthropic's Messages API for models on NVIDIA Triton Inference Server.",
        lifespan=lifespan,
        # OpenAI's clients do not expect a redirect, but handle a 404.
        redirect_slashes=False,
        checks=[
            buffered_bytes,
            RequestCounter(metrics),
            *exporters,
            OriginCheck(),
            *([authentication] if authentication else []),
            TrustedHostCheck(settings.web.hosts),
            *([traces.passed("auth")] if traces and authentication else []),
            *slo_header_checks(settings),
            *(create(settings) for create in settings.request_checks),
            *checks,
            *([ReadLimit(settings.limits.reads_per_second)] if settings.limits.reads_per_second else []),
            *([limits] if limits else []),
            *([traces.passed("rate_limit")] if traces and limits else []),
            *([usage] if usage else []),
            *([OutcomeCheck(versions)] if versions is not None else []),
        ],
    )
    add_exception_handlers(app)
    health = HealthEndpoints(models, metrics)
    app.state.health, app.state.metrics, app.state.service, app.state.pools = health, metrics, service, pools
    endpoints: list[Any] = [
        conversations,
        ChatCompletionsEndpoint(service, conversations.chats),
        CompletionsEndpoint(service),
        responses,
        EmbeddingsEndpoint(service, models.of(EmbeddingModel)),
        # The lookup returns models of all encoder kinds, so the abstract class is the right key.
        RerankEndpoint(service, models.of(EncoderModel)),  # type: ignore[type-abstract]
        TokenizeEndpoints(service),
        ModelsEndpoint(service, models, pools),
        MessagesEndpoints(service),
        *([ModerationsEndpoint(service, safety)] if safety is not None else []),
    ]
    for one in endpoints:
        one.add_routes(app)
    add_pages(app, store=settings.store is not None)
    health.add_routes(app, replicas=pools is not None)
    plugin_lifespans = [plugin(app) for plugin in plugins]
    return app


async def _close_in_threads(exporters: Sequence[ExportingCheck]) -> None:
    await asyncio.gather(*(asyncio.to_thread(exporter.close) for exporter in exporters))


def _create_auto_model(settings: GatewaySettings, embed: Embed, degradation: Degradation | None) -> AutoModel | None:
    routed = {name: alias for name, alias in settings.aliases.items() if isinstance(alias, RoutedAlias)}
    return AutoModel(routed, embed, degradation) if routed else None


def _create_response_store(settings: GatewaySettings) -> ResponseStore:
    if settings.store is None:
        return MemoryResponses(settings.responses)
    from llmops.gateway.conversations.sql_responses import SqlResponses

    return SqlResponses(settings.store, settings.responses)


def _create_version_directory(settings: GatewaySettings) -> VersionDirectory | None:
    """Return the directory of model versions, or None without a store or without replicas."""
    if settings.store is None or not settings.replicas:
        return None
    from llmops.gateway.routing.versions.version_directory import VersionDirectory

    return VersionDirectory(settings.store, settings.replicas)


def _score_recorder(versions: VersionDirectory) -> ScoreCallback:
    """Return a function that records the scores of golden prompts for the comparison of versions.

    Scores are recorded only while a rollout splits the model's traffic between versions.
    """

    def record(model: str, version: str, scores: Mapping[str, float]) -> None:
        if versions.table.is_split(model):
            versions.record(model, {"version": version, "ok": True, "golden": dict(scores)})

    return record


def _create_checkpoints(settings: GatewaySettings) -> CheckpointStore | None:
    """Return the store of answers that gateways share, or None without Redis."""
    if settings.redis is None:
        return None
    # The Redis client is an optional dependency.
    from llmops.gateway.conversations.checkpoints import CheckpointStore

    return CheckpointStore(settings.redis, settings.resume.lease)


def _price_function(billing: Billing | None) -> Callable[[datetime, str, Usage], int | None]:
    def price(at: datetime, model: str, usage: Usage) -> int | None:
        bill = billing.bill(model, usage, at) if billing is not None else None
        return None if bill is None or bill.price_id is None else bill.micros

    return price


def _objectives(settings: GatewaySettings, model: str, tier: str) -> Sequence[Objective]:
    return settings.objectives_of(model, tier or DEFAULT_TIER_NAME)
