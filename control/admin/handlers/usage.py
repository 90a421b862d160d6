"""What was used, and what it cost."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin import schemas
from llmops.control.admin.date_range import resolve_date_range
from llmops.store import dead_letters
from llmops.store.accounts.keys import require_key
from llmops.store.accounts.tenants import find_tenant, require_tenant
from llmops.store.accounts.users import require_user
from llmops.store.audit import AuditContext
from llmops.store.usage_queries import UsageFilter, UsageSum, sum_usage
from llmops.untrusted_text import escape_unsafe

#: Characters that are shown of a parked event: more than an event of a gateway has.
MAX_ROWS = 4096


async def read(connection: AsyncConnection, by: AuditContext, asked: schemas.UsageReportQuery) -> schemas.UsageReport:
    period = resolve_date_range(asked.first, asked.last, by.at)
    wanted = await _filter(connection, asked, period)
    (total,) = await sum_usage(connection, wanted)
    groups = tuple(dict.fromkeys(asked.by))
    lines = await sum_usage(connection, wanted, groups) if groups else ()
    return schemas.UsageReport(period=period, **usage_totals(total), lines=tuple(usage_line(one) for one in lines))


async def list_dead_letters(
    connection: AsyncConnection, by: AuditContext, asked: schemas.DeadLetterListQuery
) -> tuple[schemas.DeadLetterRead, ...]:
    """Return the newest events that are on no bill."""
    return tuple(
        schemas.DeadLetterRead(
            reason=one.reason,
            source=escape_unsafe(one.source),
            signed=one.event_id is not None,
            count=count,
            last_at=last,
            value=escape_unsafe(one.value.decode("utf-8", "replace"), MAX_ROWS),
        )
        for one, count, last in await dead_letters.list_dead_letters(connection, asked.limit)
    )


def usage_totals(one: UsageSum) -> dict[str, Any]:
    names = ("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost_micros")
    return {name: getattr(one, name) for name in names} | {"cost_usd": one.cost_micros / 1e6}


def usage_line(one: UsageSum) -> schemas.UsageLine:
    # usage of a user whom nobody knows is on the bill all the same
    named: dict[str, Any] = {name: "unknown" if value is None else str(value) for name, value in one.group.items()}
    return schemas.UsageLine(**usage_totals(one), **named)


async def _filter(
    connection: AsyncConnection, asked: schemas.UsageReportQuery, period: schemas.DateRange
) -> UsageFilter:
    """Raises UnknownNameError for a tenant, user or key that was never there; a deleted one was."""
    if asked.tenant and await find_tenant(connection, asked.tenant) is None:
        await require_tenant(connection, asked.tenant)
    return UsageFilter(
        tenant_id=asked.tenant,
        user_id=(await require_user(connection, asked.user)).id if asked.user else None,
        key_id=(await require_key(connection, asked.key)).id if asked.key else None,
        model=asked.model,
        first=period.first,
        last=period.last,
    )
