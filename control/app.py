"""What control serves: as an application of its own, or as the guest of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from llmops import __version__
from llmops.control.admin.operations import OPERATIONS
from llmops.control.admin.routes import add_admin
from llmops.control.leader_election import run_while_leading
from llmops.control.leader_jobs import LeaderJob, cancel_tasks, run_jobs
from llmops.control.metrics import ControlMetrics
from llmops.control.models_api import ModelDescriptionList, ModelDescriptionsEndpoint
from llmops.control.openai_usage import (
    BucketPage,
    OrganizationCostsQuery,
    OrganizationEndpoints,
    OrganizationUsageQuery,
)
from llmops.control.openapi_parameters import get_route_options
from llmops.control.request_parsing import json_response
from llmops.control.shared_store import SharedStore
from llmops.control.spending_collector import SpendingCollector
from llmops.control.usage_api import CallerUsage, CallerUsageEndpoint, CallerUsageQuery
from llmops.gateway.auth.authentication import create_authentication
from llmops.gateway.http.error_handlers import add_exception_handlers
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.settings import GatewaySettings
from llmops.store.store_url import StoreUrl

MakeJobs = Callable[[], Sequence[LeaderJob]]
BODIES: tuple[type[BaseModel], ...] = tuple(one.asked for one in OPERATIONS if one.has_body)


class Control:
    """Its routes on an application, and what lives as long as that does. `gateway`: a client of one, for what models
    there are; `duties` makes those of the process that leads."""

    def __init__(
        self,
        store: SharedStore,
        duties: MakeJobs,
        gateway: httpx.AsyncClient | None,
        leads: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._store, self._gateway = store, gateway
        self._duties, self._leads = duties, leads

    def add_to(self, app: FastAPI) -> None:
        add_admin(app, self._store)
        usage, models = CallerUsageEndpoint(self._store), ModelDescriptionsEndpoint(self._store, self._gateway)
        organization = OrganizationEndpoints(self._store)
        own: dict[str, Any] = {"methods": ["GET"], "tags": ["usage"], "summary": "Show the caller's own usage"}
        app.add_api_route("/api/usage", usage.handle, **own, **get_route_options(CallerUsageQuery, CallerUsage))
        own["summary"] = "Describe models and their prices"
        app.add_api_route("/api/models", models.handle, **own, responses={200: {"model": ModelDescriptionList}})
        of_tenant: dict[str, Any] = {"methods": ["GET"], "tags": ["openai"]}
        begins = "/v1/organization"
        app.add_api_route(
            f"{begins}/usage/completions",
            organization.usage,
            summary="Show usage by time",
            **of_tenant,
            **get_route_options(OrganizationUsageQuery, BucketPage),
        )
        app.add_api_route(
            f"{begins}/costs",
            organization.costs,
            summary="Show costs by day",
            **of_tenant,
            **get_route_options(OrganizationCostsQuery, BucketPage),
        )
        app.body_models.extend(BODIES)

    @asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        leading = asyncio.create_task(self._lead(), name="lead")
        try:
            yield
        finally:
            await cancel_tasks([leading])
            if self._gateway is not None:
                await self._gateway.aclose()
            await self._store.close()

    async def ready(self, request: Request) -> Response:
        """Whether the store can be asked."""
        async with self._store.read():
            return json_response({"status": "ready"})

    async def _lead(self) -> None:
        await run_while_leading(StoreUrl.parse(self._store.url), lambda: run_jobs(self._duties()), self._leads)


def create_app(settings: GatewaySettings, duties: MakeJobs, gateway: str | None = None) -> GatewayApp:
    """An application of its own. `gateway`: the URL of one."""
    assert settings.store is not None
    store, access = SharedStore(settings.store), create_authentication(settings)
    meters = ControlMetrics(SpendingCollector(store))
    client = httpx.AsyncClient(base_url=gateway, timeout=10.0) if gateway else None
    control = Control(store, duties, client, meters.leads)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with control.living():
            yield
        if access is not None:
            await access.close()

    app = GatewayApp(
        title="llmops control",
        version=__version__,
        description="Administration, usage and costs.",
        lifespan=lifespan,
        redirect_slashes=False,
        checks=[meters, *([access] if access else [])],
    )
    add_exception_handlers(app)
    control.add_to(app)
    app.add_api_route("/health/live", live, methods=["GET"], tags=["health"], summary="Say that control runs")
    app.add_api_route(
        "/health/ready", control.ready, methods=["GET"], tags=["health"], summary="Say whether the store answers"
    )
    app.add_api_route("/metrics", meters.show, methods=["GET"], tags=["health"], summary="Show metrics for Prometheus")
    return app


def control_plugin(
    settings: GatewaySettings, duties: MakeJobs
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Control inside a gateway that has these settings: behind its door, on its port."""

    def enter(app: FastAPI) -> AbstractAsyncContextManager[None]:
        # asked as a client would: what a key may see is decided in one place
        gateway = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")
        assert settings.store is not None
        control = Control(SharedStore(settings.store), duties, gateway)
        control.add_to(app)
        return control.living()

    return enter


async def live(request: Request) -> Response:
    return json_response({"status": "live"})
