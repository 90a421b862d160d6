"""What was used, and what it cost."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin import wire
from llmops.control.admin.period import period_of
from llmops.store.accounts.keys import require_key
from llmops.store.accounts.tenants import find_tenant, require_tenant
from llmops.store.accounts.users import require_user
from llmops.store.audit import By
from llmops.store.parked import list_parked
from llmops.store.usage import UsageFilter, UsageSum, sum_usage
from llmops.texts import shown

#: Characters that are shown of a parked event: more than an event of a gateway has.
MOST_SHOWN = 4096


async def read(connection: AsyncConnection, by: By, asked: wire.UsageWanted) -> wire.Usage:
    period = period_of(asked.first, asked.last, by.at)
    wanted = await _filter(connection, asked, period)
    (total,) = await sum_usage(connection, wanted)
    groups = tuple(dict.fromkeys(asked.by))
    lines = await sum_usage(connection, wanted, groups) if groups else ()
    return wire.Usage(period=period, **counts(total), lines=tuple(line(one) for one in lines))


async def parked(connection: AsyncConnection, by: By, asked: wire.ParkedWanted) -> tuple[wire.ParkedEvent, ...]:
    """Return the newest events that are on no bill."""
    return tuple(
        wire.ParkedEvent(
            reason=one.reason,
            source=shown(one.source),
            signed=one.event_id is not None,
            count=count,
            last_at=last,
            value=shown(one.value.decode("utf-8", "replace"), MOST_SHOWN),
        )
        for one, count, last in await list_parked(connection, asked.limit)
    )


def counts(one: UsageSum) -> dict[str, Any]:
    names = ("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost_micros")
    return {name: getattr(one, name) for name in names} | {"cost_usd": one.cost_micros / 1e6}


def line(one: UsageSum) -> wire.UsageLine:
    # usage of a user whom nobody knows is on the bill all the same
    named: dict[str, Any] = {name: "unknown" if value is None else str(value) for name, value in one.group.items()}
    return wire.UsageLine(**counts(one), **named)


async def _filter(connection: AsyncConnection, asked: wire.UsageWanted, period: wire.Period) -> UsageFilter:
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
