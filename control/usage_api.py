"""The endpoint /api/usage: the caller's own usage, its cost, and the remaining budgets."""

from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Query
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from llmops.control.admin.routes import read_sums, report_fields
from llmops.control.admin.schemas import AdminSchema, DateRange, UsageReport
from llmops.control.api_route import CurrentCaller, json_response, make_router
from llmops.control.store_access import StoreOfApp, client_errors
from llmops.gateway.errors import ForbiddenError
from llmops.gateway.interfaces import Caller
from llmops.store.usage_queries import UsageFilter, spent_micros

UsageOwner = Literal["key", "user", "tenant"]

#: User id in the totals for requests without a key.
ANONYMOUS = str(UUID(int=0))

router = make_router(tags=["usage"])


class CallerUsageQuery(AdminSchema):
    """The query of GET /api/usage.

    `of` selects the usage of the key, its user or (with the scope `usage`) its tenant. The default
    is the key, or the user for a login without a key.
    """

    of: UsageOwner | None = None
    first: date | None = Field(default=None, alias="from")
    last: date | None = Field(default=None, alias="to")
    by: tuple[Literal["day", "model", "key", "user"], ...] = ()


class BudgetStatus(AdminSchema):
    """A budget of the key or its tenant, and the remaining amount.

    The figures are for the current period, which ends at `until`.
    """

    of: Literal["key", "tenant"]
    usd: float
    period: str
    spent_usd: float
    left_usd: float
    until: datetime


class CallerUsage(UsageReport):
    """The usage of the caller's key, user or tenant, and the budgets that limit the caller."""

    of: UsageOwner
    budgets: tuple[BudgetStatus, ...]


@router.get("/api/usage", summary="Show the caller's own usage", response_model=CallerUsage)
async def read_own_usage(
    store: StoreOfApp, caller: CurrentCaller, query: Annotated[CallerUsageQuery, Query()]
) -> Response:
    owner = query.of or ("user" if caller.tenant_id and not caller.key_id else "key")
    if owner == "tenant" and "usage" not in caller.scopes:
        raise ForbiddenError("This key may not read its tenant's usage; use a key with the scope 'usage'.")
    now = datetime.now(UTC)
    with client_errors():
        period = DateRange.resolve(query.first, query.last, now)
    async with store.in_turn(caller):
        async with store.read() as connection:
            total, sums = await read_sums(connection, _usage_filter(owner, caller, period), query.by)
            budgets = await _read_budgets(connection, caller, now)
        return await json_response(
            lambda: CallerUsage(period=period, of=owner, budgets=budgets, **report_fields(total, sums)),
            exclude_unset=True,
        )


def _usage_filter(owner: UsageOwner, caller: Caller, period: DateRange) -> UsageFilter:
    if not caller.tenant_id:
        ids = {"user_id": ANONYMOUS}
    elif owner == "tenant":
        ids = {"tenant_id": caller.tenant_id}
    elif owner == "key" and caller.key_id:
        ids = {"key_id": caller.key_id}
    else:
        # Filter by user as well: usage without a key has an empty key id in the totals, for all
        # users.
        ids = {"user_id": caller.user_id}
    return UsageFilter(**ids, first=period.first, last=period.last)


async def _read_budgets(connection: AsyncConnection, caller: Caller, now: datetime) -> tuple[BudgetStatus, ...]:
    budgets = []
    for quota in caller.quotas:
        budget = quota.budget
        if budget is None or quota.model is not None:
            continue
        of: Literal["key", "tenant"] = "key" if quota.of == caller.key_id else "tenant"
        ids: dict[str, Any] = {"key_id": caller.key_id} if of == "key" else {"tenant_id": caller.tenant_id}
        spent = await spent_micros(connection, budget.begins(now), **ids)
        budgets.append(
            BudgetStatus(
                of=of,
                usd=budget.micros / 1e6,
                period=budget.period,
                spent_usd=spent / 1e6,
                left_usd=max(budget.micros - spent, 0) / 1e6,
                until=budget.ends(now),
            )
        )
    return tuple(budgets)
