"""The endpoint /api/models, which lists the models of a caller with abilities and prices."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from llmops.control.admin.schemas import to_dollars
from llmops.control.api_route import CurrentCaller, make_router
from llmops.control.store_access import StoreOfApp
from llmops.gateway.errors import UnavailableError
from llmops.store.prices import Price, prices_at
from llmops.urls import fetch_bounded, without_secrets

#: Headers in which a client sends its key. They are passed on to the gateway, which decides which
#: models the caller may see.
_KEY_HEADERS = ("authorization", "x-api-key")

#: Maximum size of the gateway's list of models in bytes. A model takes about 500 bytes.
MAX_LISTING_BYTES = 4 * 2**20

#: Maximum seconds for the whole list from the gateway, because the caller waits meanwhile.
LISTING_TIMEOUT = 10.0

router = make_router(tags=["usage"])


class ModelPrice(BaseModel):
    """A price in US dollars per million tokens."""

    input: float
    cached: float
    output: float
    currency: str = "usd"


class _ListedModel(BaseModel):
    """A model in the gateway's list.

    Unknown fields are ignored, because the gateway may be of another version.
    """

    model_config = ConfigDict(populate_by_name=True)

    id: str
    context_window: int | None = Field(default=None, validation_alias="max_model_len")
    ready: bool | None = None
    parent: str | None = None
    capabilities: dict[str, Any] | None = None


class ModelDescription(_ListedModel):
    """A model and its price.

    `context_window` is the maximum of prompt and answer together, in tokens. `price` is null if no
    price is set. If control knows no gateway, all fields except `id` and `price` are null.
    """

    price: ModelPrice | None


class ModelDescriptionList(BaseModel):
    """The list of models that the caller may use."""

    object: str = "list"
    data: list[ModelDescription]


class _Listing(BaseModel):
    data: list[_ListedModel]


@router.get("/api/models", summary="Describe models and their prices")
async def describe_models(request: Request, store: StoreOfApp, caller: CurrentCaller) -> ModelDescriptionList:
    gateway: httpx.AsyncClient | None = request.app.state.gateway
    async with store.in_turn(caller), store.read() as connection:
        prices = await prices_at(connection, datetime.now(UTC))
    if gateway is None:
        models = [_ListedModel(id=name) for name in sorted(prices) if caller.may_use(name)]
    else:
        models = await _list_models(gateway, request)
    return ModelDescriptionList(data=[_describe(model, prices.get(model.id)) for model in models])


def gateway_headers(request: Request) -> dict[str, str]:
    """Return the headers with which control calls the gateway on behalf of a caller."""
    return {name: value for name in _KEY_HEADERS if (value := request.headers.get(name))}


async def _list_models(gateway: httpx.AsyncClient, request: Request) -> list[_ListedModel]:
    """Return the models that the gateway lists for the key in a request."""
    try:
        async with asyncio.timeout(LISTING_TIMEOUT):
            body = await fetch_bounded(gateway, "/v1/models", MAX_LISTING_BYTES, gateway_headers(request))
        return _Listing.model_validate_json(body).data
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TimeoutError) as error:
        detail = (
            f"{without_secrets(str(gateway.base_url))} did not list its models ({type(error).__name__}); "
            "check that it runs."
        )
        raise UnavailableError("The gateway does not list its models now; try again later.", detail=detail) from error


def _describe(model: _ListedModel, price: Price | None) -> ModelDescription:
    dollars = None
    if price is not None:
        dollars = ModelPrice(
            input=float(to_dollars(price.input_micros)),
            cached=float(to_dollars(price.cached_micros)),
            output=float(to_dollars(price.output_micros)),
        )
    return ModelDescription(**model.model_dump(), price=dollars)
