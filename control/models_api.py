"""GET /api/models: which models there are, what they can do and what they cost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import httpx
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from llmops.control.admin.money import to_dollars
from llmops.control.request_parsing import json_response
from llmops.control.shared_store import SharedStore
from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.request_context import context_of
from llmops.store.prices import Price, prices_at

_REQUESTED_FIELDS = ("authorization", "x-api-key")


class ModelPrice(BaseModel):
    """US dollars per million tokens."""

    input: float
    cached: float
    output: float
    currency: str = "usd"


class ModelDescription(BaseModel):
    """`context_window` in tokens, prompt and answer. Where no gateway was asked, all but `price` is null; `price` null:
    none is set."""

    id: str
    context_window: int | None = None
    ready: bool | None = None
    parent: str | None = None
    capabilities: dict[str, Any] | None = None
    price: ModelPrice | None


class ModelDescriptionList(BaseModel):
    object: str = "list"
    data: list[ModelDescription]


class ModelDescriptionsEndpoint:
    """Those that a gateway lists to this caller; without a gateway those that have a price."""

    def __init__(self, store: SharedStore, gateway: httpx.AsyncClient | None) -> None:
        self._store, self._gateway = store, gateway

    async def handle(self, request: Request) -> Response:
        async with self._store.read() as connection:
            prices = await prices_at(connection, datetime.now(UTC))
        if self._gateway is None:
            caller = context_of(request).caller
            known = [{"id": name} for name in sorted(prices) if caller.may_use(name)]
        else:
            known = await self._listed(self._gateway, request)
        described = [_described(entry, prices.get(entry["id"])) for entry in known]
        return json_response(ModelDescriptionList(data=described).model_dump(mode="json"))

    async def _listed(self, gateway: httpx.AsyncClient, request: Request) -> list[dict[str, Any]]:
        """With what the caller sent as a key: what it may see is the gateway's to decide."""
        headers = {name: value for name in _REQUESTED_FIELDS if (value := request.headers.get(name))}
        try:
            answer = await gateway.get("/v1/models", headers=headers)
            answer.raise_for_status()
            listed: list[dict[str, Any]] = answer.json()["data"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            said = f"{gateway.base_url} did not list its models ({type(error).__name__})."
            raise UnavailableError("The gateway cannot be asked for its models now.", detail=said) from error
        return listed


def _described(entry: dict[str, Any], price: Price | None) -> ModelDescription:
    return ModelDescription(
        id=entry["id"],
        context_window=entry.get("max_model_len"),
        ready=entry.get("ready"),
        parent=entry.get("parent"),
        capabilities=entry.get("capabilities"),
        price=None if price is None else _price(price),
    )


def _price(price: Price) -> ModelPrice:
    amounts = (price.input_micros, price.cached_micros, price.output_micros)
    into, cached, output = (float(to_dollars(micros)) for micros in amounts)
    return ModelPrice(input=into, cached=cached, output=output)
