"""OpenAI's endpoints /v1/organization/usage/completions and /v1/organization/costs.

The organization is the caller's tenant. Fields and limits follow
https://platform.openai.com/docs/api-reference/usage. Projects and batches do not exist here.
"""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal
from uuid import UUID

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.responses import Response

from llmops.control.admin.schemas import check_visible
from llmops.control.api_route import CurrentCaller, json_response, make_router
from llmops.control.store_access import SharedStore, StoreOfApp
from llmops.gateway.errors import ForbiddenError, InvalidRequestError
from llmops.gateway.http.request_body import FailFastModel
from llmops.gateway.interfaces import Caller
from llmops.store.usage_buckets import BucketSum, bucket_sums
from llmops.store.usage_queries import UsageSum

#: Width of a bucket in seconds, by the API's name of the width.
BUCKET_SECONDS = {"1m": 60, "1h": 3600, "1d": 86_400}

#: Default and maximum number of buckets in a page of usage, by bucket width, the same as OpenAI's.
USAGE_LIMITS = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}

#: Default and maximum number of buckets in a page of costs, the same as OpenAI's.
COST_LIMITS = (7, 180)

#: Groups of the usage queries, by the API's names. Other names are accepted without effect.
GROUPS = {"user_id": "user", "api_key_id": "key", "model": "model", "line_item": "model"}

#: A user id that no user has. Selects nothing.
NO_USER = str(UUID(int=1))

#: Maximum of a time in Unix seconds: the last second that a datetime and a database can express,
#: less the longest page.
MAX_TIMESTAMP = 253_402_300_799 - 200 * 86_400

_PAGE = re.compile(r"page_([0-9]{1,12})")

router = make_router(prefix="/v1/organization", tags=["openai"])


class _Query(FailFastModel):
    """Fields of both queries. `api_source` and `service_tier` are accepted without effect."""

    model_config = ConfigDict(extra="forbid")

    start_time: int = Field(ge=0, le=MAX_TIMESTAMP)
    end_time: int | None = Field(default=None, ge=0, le=MAX_TIMESTAMP)
    api_key_ids: tuple[str, ...] = ()
    project_ids: tuple[str, ...] = ()
    bucket_width: str = "1d"
    limit: int | None = Field(default=None, ge=1)
    page: str | None = None

    _visible = field_validator("*")(check_visible)


class OrganizationUsageQuery(_Query):
    """The query of usage by time."""

    bucket_width: Literal["1m", "1h", "1d"] = "1d"
    user_ids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    batch: bool | None = None
    group_by: tuple[
        Literal["project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source"], ...
    ] = ()


class OrganizationCostsQuery(_Query):
    """The query of costs by day."""

    bucket_width: Literal["1d"] = "1d"
    line_items: tuple[str, ...] = ()
    group_by: tuple[Literal["project_id", "user_id", "line_item", "api_key_id", "api_source"], ...] = ()


class UsageResult(BaseModel):
    """The usage of one group in one bucket. Only the requested groups are set."""

    object: Literal["organization.usage.completions.result"] = "organization.usage.completions.result"
    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    num_model_requests: int
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None


class CostAmount(BaseModel):
    """An amount of money in US dollars."""

    value: float
    currency: Literal["usd"] = "usd"


class CostsResult(BaseModel):
    """The costs of one group in one bucket. A `line_item` is a model."""

    object: Literal["organization.costs.result"] = "organization.costs.result"
    amount: CostAmount
    line_item: str | None = None
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None


class Bucket(BaseModel):
    """The results of a bucket, which lies between two times in Unix seconds."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[UsageResult | CostsResult]


class BucketPage(BaseModel):
    """Consecutive buckets, including buckets without usage."""

    object: Literal["page"] = "page"
    data: list[Bucket]
    has_more: bool
    next_page: str | None


@dataclass(frozen=True)
class _TimeSpan:
    """The whole buckets of a page, each `width` seconds long.

    `more` is True if later buckets were requested too.
    """

    start: int
    end: int
    width: int
    more: bool


@router.get("/usage/completions", summary="Show usage by time", response_model=BucketPage)
async def organization_usage(
    store: StoreOfApp, caller: CurrentCaller, query: Annotated[OrganizationUsageQuery, Query()]
) -> Response:
    tenant = _require_tenant(caller)
    span = _time_span(query, *USAGE_LIMITS[query.bucket_width])
    only = {"key": query.api_key_ids, "user": query.user_ids, "model": query.models}
    # no usage belongs to a batch or a project, so filtering by them selects nothing
    empty = query.batch is True or bool(query.project_ids)
    batch = False if "batch" in query.group_by else None
    async with store.in_turn(caller):
        sums = [] if empty else await _bucket_sums(store, tenant, span, query.group_by, only)
        return await json_response(lambda: _page(span, sums, lambda usage: _usage_result(usage, batch)))


@router.get("/costs", summary="Show costs by day", response_model=BucketPage)
async def organization_costs(
    store: StoreOfApp, caller: CurrentCaller, query: Annotated[OrganizationCostsQuery, Query()]
) -> Response:
    tenant = _require_tenant(caller)
    span = _time_span(query, *COST_LIMITS)
    only = {"key": query.api_key_ids, "model": query.line_items}
    async with store.in_turn(caller):
        sums = [] if query.project_ids else await _bucket_sums(store, tenant, span, query.group_by, only)
        return await json_response(lambda: _page(span, sums, _costs_result))


async def _bucket_sums(
    store: SharedStore, tenant: str, span: _TimeSpan, group_by: Sequence[str], only: dict[str, tuple[str, ...]]
) -> Sequence[BucketSum]:
    groups = tuple(dict.fromkeys(GROUPS[name] for name in group_by if name in GROUPS))
    only = only | {"user": _user_ids(only.get("user", ()))}
    async with store.read() as connection:
        return await bucket_sums(connection, tenant, span.start, span.end, span.width, groups, only)


def _require_tenant(caller: Caller) -> str:
    """Return the caller's tenant.

    Raises:
        ForbiddenError: The caller is anonymous and has no tenant.
    """
    if not caller.tenant_id:
        raise ForbiddenError(
            "This endpoint shows a tenant's usage and needs a tenant's key; send one, or use GET /api/usage."
        )
    return caller.tenant_id


def _time_span(query: _Query, default: int, maximum: int) -> _TimeSpan:
    """Return the buckets of the requested page.

    Args:
        query: The query.
        default: Number of buckets in a page if the query has no limit.
        maximum: Largest allowed limit.

    Raises:
        InvalidRequestError: The limit is too large, or the page belongs to another query.
    """
    width = BUCKET_SECONDS[query.bucket_width]
    limit = default if query.limit is None else query.limit
    if limit > maximum:
        message = f"A page has at most {maximum} buckets of {query.bucket_width}; lower 'limit'."
        raise InvalidRequestError(message, param="limit", code="invalid_value")
    end_time = int(time.time()) if query.end_time is None else query.end_time
    start = _page_start(query, width)
    # Extend the range to whole buckets: the first contains the start, the last contains the last
    # second before the end.
    last = -(-end_time // width) * width
    end = min(start + limit * width, last)
    return _TimeSpan(start=start, end=max(end, start), width=width, more=end < last)


def _page_start(query: _Query, width: int) -> int:
    if query.page is None:
        return query.start_time // width * width
    match = _PAGE.fullmatch(query.page)
    if match is None or int(match[1]) > MAX_TIMESTAMP:
        message = "'page' is not the next_page of an answer; send that value unchanged."
        raise InvalidRequestError(message, param="page", code="invalid_value")
    return int(match[1]) // width * width


def _user_ids(users: Sequence[str]) -> tuple[str, ...]:
    """Return the ids that are UUIDs, because PostgreSQL rejects other texts.

    If no id is a UUID, return an id that no user has.
    """
    ids = []
    for user in users:
        with suppress(ValueError):
            ids.append(str(UUID(user)))
    return tuple(ids) if ids or not users else (NO_USER,)


def _usage_result(usage: UsageSum, batch: bool | None) -> UsageResult:
    return UsageResult(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        input_cached_tokens=usage.cached_tokens,
        num_model_requests=usage.requests,
        user_id=usage.group.get("user"),
        api_key_id=usage.group.get("key") or None,
        model=usage.group.get("model"),
        batch=batch,
    )


def _costs_result(usage: UsageSum) -> CostsResult:
    return CostsResult(
        amount=CostAmount(value=usage.cost_micros / 1e6),
        line_item=usage.group.get("model"),
        user_id=usage.group.get("user"),
        api_key_id=usage.group.get("key") or None,
    )


def _page(
    span: _TimeSpan, sums: Sequence[BucketSum], result: Callable[[UsageSum], UsageResult | CostsResult]
) -> BucketPage:
    starts = range(span.start, span.end, span.width)
    buckets = {start: Bucket(start_time=start, end_time=start + span.width, results=[]) for start in starts}
    for bucket in sums:
        if bucket.begins in buckets:  # SQLite reads a damaged time such as February 30 as a later one
            buckets[bucket.begins].results.append(result(bucket.sum))
    next_page = f"page_{span.end}" if span.more else None
    return BucketPage(data=list(buckets.values()), has_more=span.more, next_page=next_page)
