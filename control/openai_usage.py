"""OpenAI's GET /v1/organization/usage/completions and /v1/organization/costs. The organization is the tenant.

Shapes and bounds as of https://platform.openai.com/docs/api-reference/usage. There are no projects and no batches here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from llmops.control.request_parsing import json_response, parse_query
from llmops.control.shared_store import SharedStore
from llmops.gateway.errors import ForbiddenError, InvalidRequestError
from llmops.gateway.http.request_body import FailFastModel, validate_body
from llmops.gateway.http.request_context import context_of
from llmops.store.usage_buckets import BucketSum, bucket_sums
from llmops.store.usage_queries import UsageSum

SECONDS = {"1m": 60, "1h": 3600, "1d": 86_400}
# of buckets: unless asked for, and at most
USAGE_LIMITS = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
COST_LIMITS = (7, 180)
GROUPS = {"user_id": "user", "api_key_id": "key", "model": "model", "line_item": "model"}
ANONYMOUS_USER = str(UUID(int=1))
_PAGE = re.compile(r"page_([0-9]{1,12})")
# the last second that a datetime and a database both know, less the widest page
MAX_TIMESTAMP = 253_402_300_799 - 200 * 86_400


class _Query(FailFastModel):
    """What both ask. `api_source` and `service_tier` are OpenAI's own and group nothing here."""

    model_config = ConfigDict(extra="forbid")

    start_time: int = Field(ge=0, le=MAX_TIMESTAMP)
    end_time: int | None = Field(default=None, ge=0, le=MAX_TIMESTAMP)
    api_key_ids: tuple[str, ...] = ()
    project_ids: tuple[str, ...] = ()
    bucket_width: str = "1d"
    limit: int | None = Field(default=None, ge=1)
    page: str | None = None


class OrganizationUsageQuery(_Query):
    bucket_width: Literal["1m", "1h", "1d"] = "1d"
    user_ids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    batch: bool | None = None
    group_by: tuple[
        Literal["project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source"], ...
    ] = ()


class OrganizationCostsQuery(_Query):
    bucket_width: Literal["1d"] = "1d"
    line_items: tuple[str, ...] = ()
    group_by: tuple[Literal["project_id", "user_id", "line_item", "api_key_id", "api_source"], ...] = ()


class UsageResult(BaseModel):
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
    value: float
    currency: Literal["usd"] = "usd"


class CostsResult(BaseModel):
    """A `line_item` is a model."""

    object: Literal["organization.costs.result"] = "organization.costs.result"
    amount: CostAmount
    line_item: str | None = None
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None


class Bucket(BaseModel):
    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[UsageResult | CostsResult]


class BucketPage(BaseModel):
    object: Literal["page"] = "page"
    data: list[Bucket]
    has_more: bool
    next_page: str | None


@dataclass(frozen=True)
class _Span:
    """The buckets of one page, whole ones: from `begins` to `ends`; `more` where there are others before the end that
    was asked for."""

    begins: int
    ends: int
    width: int
    more: bool


class OrganizationEndpoints:
    """Both endpoints."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store

    async def usage(self, request: Request) -> Response:
        tenant = _tenant_of(request)
        asked = validate_body(OrganizationUsageQuery, parse_query(request, OrganizationUsageQuery))
        span = _span(asked, *USAGE_LIMITS[asked.bucket_width])
        only = {"key": asked.api_key_ids, "user": asked.user_ids, "model": asked.models}
        # nothing here is a batch, or of a project
        empty = asked.batch is True or bool(asked.project_ids)
        sums = [] if empty else await self._sums(tenant, span, asked.group_by, only)
        batch = False if "batch" in asked.group_by else None
        return _page(span, [(one.begins, _usage(one.sum, batch)) for one in sums])

    async def costs(self, request: Request) -> Response:
        tenant = _tenant_of(request)
        asked = validate_body(OrganizationCostsQuery, parse_query(request, OrganizationCostsQuery))
        span = _span(asked, *COST_LIMITS)
        only = {"key": asked.api_key_ids, "model": asked.line_items}
        sums = [] if asked.project_ids else await self._sums(tenant, span, asked.group_by, only)
        return _page(span, [(one.begins, _costs(one.sum)) for one in sums])

    async def _sums(
        self, tenant: str, span: _Span, group_by: Sequence[str], only: dict[str, tuple[str, ...]]
    ) -> Sequence[BucketSum]:
        by = tuple(dict.fromkeys(GROUPS[name] for name in group_by if name in GROUPS))
        only = only | {"user": _ids(only.get("user", ()))}
        async with self._store.read() as connection:
            return await bucket_sums(connection, tenant, span.begins, span.ends, span.width, by, only)


def _tenant_of(request: Request) -> str:
    """Raises ForbiddenError where nobody is asked for a key: then there are no tenants."""
    tenant = context_of(request).caller.tenant_id
    if not tenant:
        raise ForbiddenError(
            "This request has no key of a tenant, whose usage this is; send one, or use GET /api/usage."
        )
    return tenant


def _span(asked: _Query, usual: int, most: int) -> _Span:
    """Raises InvalidRequestError for a page of another query, or more buckets than one answer has."""
    width = SECONDS[asked.bucket_width]
    limit = usual if asked.limit is None else asked.limit
    if limit > most:
        said = f"A page has at most {most} buckets of {asked.bucket_width}."
        raise InvalidRequestError(said, param="limit", code="invalid_value")
    end = int(time.time()) if asked.end_time is None else asked.end_time
    begins = _begin(asked, width)
    # whole buckets: the first holds the start, the last the second before the end
    last = -(-end // width) * width
    ends = min(begins + limit * width, last)
    return _Span(begins, max(ends, begins), width, ends < last)


def _begin(asked: _Query, width: int) -> int:
    if asked.page is None:
        return asked.start_time // width * width
    found = _PAGE.fullmatch(asked.page)
    if found is None or int(found[1]) > MAX_TIMESTAMP:
        said = "'page' is not the next_page of an answer; send that value unchanged."
        raise InvalidRequestError(said, param="page", code="invalid_value")
    return int(found[1]) // width * width


def _ids(users: Sequence[str]) -> tuple[str, ...]:
    """Those that can be a user's; PostgreSQL breaks on others. Of nobody, where all of them are others."""
    known = []
    for user in users:
        with suppress(ValueError):
            known.append(str(UUID(user)))
    return tuple(known) if known or not users else (ANONYMOUS_USER,)


def _usage(one: UsageSum, batch: bool | None) -> UsageResult:
    return UsageResult(
        input_tokens=one.input_tokens,
        output_tokens=one.output_tokens,
        input_cached_tokens=one.cached_tokens,
        num_model_requests=one.requests,
        user_id=one.group.get("user"),
        api_key_id=one.group.get("key") or None,
        model=one.group.get("model"),
        batch=batch,
    )


def _costs(one: UsageSum) -> CostsResult:
    return CostsResult(
        amount=CostAmount(value=one.cost_micros / 1e6),
        line_item=one.group.get("model"),
        user_id=one.group.get("user"),
        api_key_id=one.group.get("key") or None,
    )


def _page(span: _Span, results: Sequence[tuple[int, UsageResult | CostsResult]]) -> Response:
    """Also of buckets in which nothing was used."""
    begun = range(span.begins, span.ends, span.width)
    buckets = {begins: Bucket(start_time=begins, end_time=begins + span.width, results=[]) for begins in begun}
    for begins, result in results:
        buckets[begins].results.append(result)
    next_page = f"page_{span.ends}" if span.more else None
    page = BucketPage(data=list(buckets.values()), has_more=span.more, next_page=next_page)
    return json_response(page.model_dump(mode="json"))
