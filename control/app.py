"""The control application: administration, usage and the leader's jobs.

It runs alone or inside a gateway.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
from fastapi import FastAPI
from sqlalchemy import text
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmops import __version__
from llmops.background import STATUS_CHECKS_PER_SECOND, SingleFlight, cancel_tasks
from llmops.control import models_api, openai_usage, operations_api, usage_api
from llmops.control.admin.routes import add_admin_routes
from llmops.control.api_route import add_routes
from llmops.control.leader_election import run_while_leading
from llmops.control.leader_jobs import LeaderJob, MakeJobs, run_jobs
from llmops.control.metrics import ControlMetrics, SpendingCollector
from llmops.control.reconcile import Reconciler
from llmops.control.retention import Retention
from llmops.control.rollouts import gates
from llmops.control.rollouts import routes as rollout_routes
from llmops.control.rollouts.runner import RolloutRunner
from llmops.control.rollouts.version_replicas import VersionReplicas
from llmops.control.store_access import SharedStore
from llmops.distribution import missing_extra
from llmops.gateway.auth.authentication import create_authentication, keys_required
from llmops.gateway.http.error_handlers import add_exception_handlers
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.server import DrainingServer, bind, tune_memory, uvicorn_config
from llmops.gateway.ratelimit.read_limit import ReadLimit
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.web.browser_security import OriginCheck, TrustedHostCheck
from llmops.gateway.web.pages import add_pages
from llmops.store.store_url import StoreUrl

#: Maximum seconds for the gateway's list of models, because a page of the browser waits for it.
GATEWAY_TIMEOUT = 10.0


class Control:
    """The control API of an application, and the leader's jobs while the application runs.

    Args:
        store: The store.
        make_jobs: Returns the jobs to run when this process becomes the leader.
        gateway: A client of the gateway whose models are listed, or None.
        settings: The settings.
        on_leading: Called with True when this process becomes the leader, and with False when it
            loses the leadership.
    """

    def __init__(
        self,
        store: SharedStore,
        make_jobs: MakeJobs,
        gateway: httpx.AsyncClient | None,
        settings: GatewaySettings,
        on_leading: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._store, self._gateway, self._settings = store, gateway, settings
        self._make_jobs, self._on_leading = make_jobs, on_leading
        self._readiness = SingleFlight(self._check_store, STATUS_CHECKS_PER_SECOND)

    def add_to(self, app: FastAPI) -> None:
        """Add the routes of the control API to an application."""
        app.state.store, app.state.gateway, app.state.settings = self._store, self._gateway, self._settings
        add_admin_routes(app, self._store)
        for module in (usage_api, models_api, openai_usage, operations_api, rollout_routes, gates):
            add_routes(app, module.router)

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Take part in the leader election, and close all connections at the end."""
        election = asyncio.create_task(self._lead(), name="leader election")
        try:
            yield
        finally:
            await cancel_tasks(election)
            if self._gateway is not None:
                await self._gateway.aclose()
            await self._store.close()

    async def ready(self, _request: Request) -> Response:
        """Return a response that tells whether the store can be reached."""
        await self._readiness.get()
        return JSONResponse({"status": "ready"})

    async def _check_store(self) -> None:
        async with self._store.read() as connection:
            await connection.execute(text("SELECT 1"))

    async def _lead(self) -> None:
        await run_while_leading(StoreUrl.parse(self._store.url), lambda: run_jobs(self._make_jobs()), self._on_leading)


def create_app(settings: GatewaySettings, make_jobs: MakeJobs, gateway: str | None = None) -> GatewayApp:
    """Return an application that has only the control API.

    Args:
        settings: The settings, in which `store` is set.
        make_jobs: Returns the leader's jobs.
        gateway: URL of the gateway whose models are listed, or None.
    """
    assert settings.store is not None
    store, authentication = SharedStore(settings.store), create_authentication(settings)
    metrics = ControlMetrics(SpendingCollector(store))
    client = httpx.AsyncClient(base_url=gateway, timeout=GATEWAY_TIMEOUT) if gateway else None
    control = Control(store, make_jobs, client, settings, metrics.set_leading)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with control.lifespan():
            yield
        if authentication is not None:
            await authentication.close()

    app = GatewayApp(
        title="llmops control",
        version=__version__,
        description="Administration, usage and costs.",
        lifespan=lifespan,
        redirect_slashes=False,
        checks=[
            metrics,
            OriginCheck(),
            *([authentication] if authentication else []),
            TrustedHostCheck(settings.web.hosts),
            *([ReadLimit(settings.limits.reads_per_second)] if settings.limits.reads_per_second else []),
        ],
    )
    add_exception_handlers(app)
    control.add_to(app)
    add_pages(app, chat=False)
    for path, endpoint, summary in (
        ("/health/live", _live, "Report that control runs"),
        ("/health/ready", control.ready, "Report whether the store answers"),
        ("/metrics", metrics.show, "Show metrics for Prometheus"),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], tags=["health"], summary=summary)
    return app


def control_plugin(
    settings: GatewaySettings, make_jobs: MakeJobs
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a plugin that adds the control API to a gateway with these settings.

    The routes of the control API are behind the gateway's authentication.
    """

    def enter(app: FastAPI) -> AbstractAsyncContextManager[None]:
        # Control is a client of its own gateway, so that one place decides which models a key may
        # see.
        gateway = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")
        assert settings.store is not None
        control = Control(SharedStore(settings.store), make_jobs, gateway, settings)
        control.add_to(app)
        return control.lifespan()

    return enter


def make_leader_jobs(settings: GatewaySettings, replicas: VersionReplicas) -> Sequence[LeaderJob]:
    """Return the leader's jobs.

    Args:
        settings: The settings, in which `store` is set.
        replicas: Starts and stops the replicas of roll-outs.

    Raises:
        MissingDependencyError: Kafka is configured and its client is not installed.
        InputError: Kafka is configured without a signing key.
    """
    assert settings.store is not None
    jobs: list[LeaderJob] = [
        Reconciler(settings.store, settings.usage.engines),
        RolloutRunner(settings.store, replicas),
    ]
    if settings.audit.days is not None:
        jobs.append(Retention(settings.store, settings.audit.days))
    if settings.kafka is not None:
        try:
            from llmops.control.ledger import Ledger
        except ModuleNotFoundError as error:
            raise missing_extra(f"Kafka needs {error.name}, which is not installed", "kafka") from error
        jobs.append(Ledger(settings.kafka, settings.store))
    return jobs


def run(
    settings: GatewaySettings,
    gateway: str | None,
    on_listening: Callable[[str, bool], None],
    replicas: VersionReplicas,
) -> bool:
    """Serve the control API until SIGTERM or Ctrl-C.

    Args:
        settings: The settings, in which `store` is set.
        gateway: URL of the gateway whose models are listed, or None.
        on_listening: Called with the base URL, and with True if callers need keys.
        replicas: Starts and stops the replicas of roll-outs.

    Returns:
        True if a second signal ended the process early.

    Raises:
        InputError: The host lets other machines connect, but callers need no keys.
    """
    listener = bind(settings.host, settings.port)
    try:
        keys = keys_required(settings)
        host, port = listener.getsockname()[:2]
        on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", keys)
        app = create_app(settings, lambda: make_leader_jobs(settings, replicas), gateway)
        tune_memory()
        server = DrainingServer(uvicorn_config(app, settings), lambda: None)
        server.run(sockets=[listener])
        return server.force_exit
    finally:
        listener.close()


async def _live(_request: Request) -> Response:
    return JSONResponse({"status": "live"})
