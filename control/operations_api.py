"""The endpoints of the administration page, /api/admin/replicas and /api/admin/alerts."""

import asyncio
from typing import Annotated, Any

import httpx
from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import Request

from llmops.control.admin.routes import AdminRoute
from llmops.control.api_route import make_router
from llmops.control.models_api import gateway_headers
from llmops.fair_client import fair_client
from llmops.gateway.errors import ForbiddenError, UnavailableError
from llmops.gateway.settings import GatewaySettings
from llmops.input_files import MALFORMED, parse_json
from llmops.urls import fetch_bounded, without_secrets

#: Maximum size of an answer of Prometheus or of a gateway in bytes. An alert takes about a
#: kilobyte.
MAX_ANSWER_BYTES = 4 << 20
#: Maximum seconds for a whole answer of Prometheus, because the page waits for it.
PROMETHEUS_TIMEOUT = 5.0
#: Maximum seconds for all answers of the gateway together, because the page waits for them.
GATEWAY_TIMEOUT = 10.0

router = make_router(prefix="/api/admin", tags=["admin"], route_class=AdminRoute)


class FleetState(BaseModel):
    """The state of models and replicas, as the gateway reports it.

    `models` are the models of GET /v1/models. `gateways` has the rows of GET /replicas for each
    worker of the gateway, and is empty for a gateway with one server.
    """

    models: list[dict[str, Any]]
    gateways: list[dict[str, Any]]


class Alert(BaseModel):
    """An alert of Prometheus that is pending or firing."""

    name: str
    state: str
    priority: str = ""
    summary: str = ""
    since: str = ""
    runbook: str = ""
    labels: dict[str, str] = {}


class AlertList(BaseModel):
    """The alerts of Prometheus. `configured` is false if `web.prometheus` is not set."""

    configured: bool
    data: list[Alert] = []


async def _settings(request: Request) -> GatewaySettings:
    settings: GatewaySettings = request.app.state.settings
    return settings


@router.get("/replicas", summary="Show models and replicas as the gateway sees them")
async def read_replicas(request: Request) -> FleetState:
    gateway: httpx.AsyncClient | None = request.app.state.gateway
    if gateway is None:
        raise UnavailableError("This control does not know its gateway; start it with `llmops control --gateway URL`.")
    headers = gateway_headers(request)
    try:
        async with asyncio.timeout(GATEWAY_TIMEOUT):
            models = await fetch_bounded(gateway, "/v1/models", MAX_ANSWER_BYTES, headers)
            try:
                replicas = await fetch_bounded(gateway, "/replicas", MAX_ANSWER_BYTES, headers)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != 404:
                    raise
                # a gateway with a single server does not serve GET /replicas
                replicas = b'{"gateways": []}'
        return FleetState(
            models=parse_json(models, surrogates=True)["data"],
            gateways=parse_json(replicas, surrogates=True)["gateways"],
        )
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, *MALFORMED) as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 403:
            raise ForbiddenError(
                "Models and replicas need a key with the scope 'inference' as well; use another key."
            ) from error
        detail = (
            f"{without_secrets(str(gateway.base_url))} did not describe its replicas ({type(error).__name__}); "
            "check that it runs."
        )
        raise UnavailableError(
            "The gateway does not report its replicas now; try again later.", detail=detail
        ) from error


@router.get("/alerts", summary="List the alerts of Prometheus")
async def read_alerts(settings: Annotated[GatewaySettings, Depends(_settings)]) -> AlertList:
    if settings.web.prometheus is None:
        return AlertList(configured=False)
    url = f"{settings.web.prometheus.rstrip('/')}/api/v1/alerts"
    try:
        async with asyncio.timeout(PROMETHEUS_TIMEOUT), fair_client(timeout=PROMETHEUS_TIMEOUT) as client:
            found = parse_json(await fetch_bounded(client, url, MAX_ANSWER_BYTES), surrogates=True)["data"]["alerts"]
        return AlertList(configured=True, data=sorted(map(_alert, found), key=_rank))
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, *MALFORMED) as error:
        detail = (
            f"{without_secrets(url)} did not list its alerts ({error or type(error).__name__}); check that it runs."
        )
        message = "Prometheus does not list its alerts now; check the setting web.prometheus."
        raise UnavailableError(message, detail=detail) from error


def _alert(alert: dict[str, Any]) -> Alert:
    labels, notes = dict(alert["labels"]), alert.get("annotations") or {}
    runbook = str(notes.get("runbook_url", ""))
    return Alert(
        name=str(labels.pop("alertname", "")),
        state=str(alert["state"]),
        priority=str(labels.pop("priority", "")),
        summary=str(notes.get("summary", "")),
        since=str(alert.get("activeAt", "")),
        runbook=runbook if runbook.startswith(("https://", "http://")) else "",
        labels={str(name): str(value) for name, value in labels.items()},
    )


def _rank(alert: Alert) -> tuple[bool, str, str]:
    """Return a sort key that puts firing alerts first, and urgent alerts before others."""
    return alert.state != "firing", alert.priority or "P9", alert.since
