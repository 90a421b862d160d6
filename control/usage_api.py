"""GET /api/usage: what the one who asks used, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response

from llmops.control.admin.date_range import resolve_date_range
from llmops.control.admin.handlers.usage import usage_line, usage_totals
from llmops.control.admin.schemas import AdminSchema, UsageReport
from llmops.control.errors import as_api_error
from llmops.control.request_parsing import json_response, parse_query
from llmops.control.shared_store import SharedStore
from llmops.errors import InputError
from llmops.gateway.errors import ForbiddenError, InvalidRequestError
from llmops.gateway.http.request_body import validate_body
from llmops.gateway.http.request_context import context_of
from llmops.gateway.interfaces import Caller
from llmops.store.usage_queries import UsageFilter, spent_micros, sum_usage

UsageOwner = Literal["key", "user", "tenant"]
# what can be told apart in the usage of each
GROUPS: dict[str, tuple[str, ...]] = {
    "key": ("day", "model"),
    "user": ("day", "model", "key"),
    "tenant": ("day", "model", "key", "user"),
}
# under which a gateway keeps what is used without a key
ANONYMOUS = str(UUID(int=0))


class CallerUsageQuery(AdminSchema):
    """Usage `of` this key, of all that its user has or, with the scope `usage`, of its tenant's; of the key unless
    asked for, of the user where it is no key that was sent."""

    of: UsageOwner | None = None
    first: date | None = Field(default=None, validation_alias="from", serialization_alias="from")
    last: date | None = Field(default=None, validation_alias="to", serialization_alias="to")
    by: tuple[Literal["day", "model", "key", "user"], ...] = ()


class BudgetStatus(AdminSchema):
    """A budget of the key or its tenant, and what is left of it in the present period, which ends at `until`."""

    of: Literal["key", "tenant"]
    usd: float
    period: str
    spent_usd: float
    left_usd: float
    until: datetime


class CallerUsage(UsageReport):
    of: UsageOwner
    budgets: tuple[BudgetStatus, ...]


class CallerUsageEndpoint:
    def __init__(self, store: SharedStore) -> None:
        self._store = store

    async def handle(self, request: Request) -> Response:
        caller, now = context_of(request).caller, datetime.now(UTC)
        asked = validate_body(CallerUsageQuery, parse_query(request, CallerUsageQuery))
        of = asked.of or ("user" if caller.tenant_id and not caller.key_id else "key")
        _validate_scope(of, asked.by, caller)
        try:
            period = resolve_date_range(asked.first, asked.last, now)
        except InputError as error:
            raise as_api_error(error) from error
        wanted = _filter(of, caller, period.first, period.last)
        groups = tuple(dict.fromkeys(asked.by))
        async with self._store.read() as connection:
            (total,) = await sum_usage(connection, wanted)
            lines = await sum_usage(connection, wanted, groups) if groups else ()
            budgets = await _budgets(connection, caller, now)
        told = CallerUsage(
            period=period, of=of, **usage_totals(total), budgets=budgets, lines=tuple(usage_line(one) for one in lines)
        )
        return json_response(told.data())


def _validate_scope(of: UsageOwner, by: Sequence[str], caller: Caller) -> None:
    """Raises ForbiddenError for others' usage without the scope, InvalidRequestError for groups that are not there."""
    if of == "tenant" and "usage" not in caller.scopes:
        raise ForbiddenError("This key may not read its tenant's usage; use a key with the scope 'usage'.")
    unknown = [name for name in by if name not in GROUPS[of]]
    if unknown:
        known = ", ".join(GROUPS[of])
        raise InvalidRequestError(f"The usage of a {of} cannot be grouped by {unknown[0]}; use {known}.", param="by")


def _filter(of: UsageOwner, caller: Caller, first: date, last: date) -> UsageFilter:
    if not caller.tenant_id:
        return UsageFilter(user_id=ANONYMOUS, first=first, last=last)
    mine: dict[str, Any] = {"user_id": caller.user_id}
    if of == "tenant":
        mine = {"tenant_id": caller.tenant_id}
    # all that comes without a key has the same in the totals: none
    elif of == "key" and caller.key_id:
        mine = {"key_id": caller.key_id}
    return UsageFilter(**mine, first=first, last=last)


async def _budgets(connection: AsyncConnection, caller: Caller, now: datetime) -> tuple[BudgetStatus, ...]:
    found = []
    for quota in caller.quotas:
        budget = quota.budget
        if budget is None or quota.model is not None:
            continue
        of: Literal["key", "tenant"] = "key" if quota.of == caller.key_id else "tenant"
        whose: dict[str, Any] = {"key_id": caller.key_id} if of == "key" else {"tenant_id": caller.tenant_id}
        spent = await spent_micros(connection, budget.begins(now), **whose)
        found.append(
            BudgetStatus(
                of=of,
                usd=budget.micros / 1e6,
                period=budget.period,
                spent_usd=spent / 1e6,
                left_usd=max(budget.micros - spent, 0) / 1e6,
                until=budget.ends(now),
            )
        )
    return tuple(found)
