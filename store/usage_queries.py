"""What was used: sums per day, and which events of a gateway have not arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, FromClause, RowMapping, Select, Table, any_, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.store.tables import dead_letters, gateways, tenant_totals, usage_records, usage_totals, users
from llmops.store.usage_writes import SUMMED

GROUPS = ("day", "tenant", "user", "model", "key")
_COARSE = frozenset({"day", "tenant", "model"})
_members = users.alias("members")
_MARK = select(gateways.c.next_seq).where(gateways.c.id == bindparam("gateway"))


@dataclass(frozen=True)
class UsageFilter:
    """Which usage: of one tenant, user, model or key, on the UTC days from `first` to `last`, both included."""

    tenant_id: str | None = None
    user_id: str | None = None
    model: str | None = None
    key_id: str | None = None
    first: date | None = None
    last: date | None = None


@dataclass(frozen=True)
class UsageSum:
    """`group` has a value for each of the groups that were asked for: a date, or a name."""

    group: dict[str, Any]
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost_micros: int


@dataclass(frozen=True)
class SequenceGap:
    """Events `first` to `last` of a gateway have not arrived, while a later one has."""

    gateway_id: str
    first: int
    last: int


async def sum_usage(connection: AsyncConnection, wanted: UsageFilter, by: Sequence[str] = ()) -> Sequence[UsageSum]:
    """Sums by the groups of `by` (of `GROUPS`), in their order. Without groups it is one sum, perhaps of zeros."""
    given = {name: value for name, value in vars(wanted).items() if value is not None}
    statement = _summing(tuple(by), frozenset(given), connection.dialect.name)
    rows = (await connection.execute(statement, given)).mappings().all()
    return [UsageSum(group=_group(row, by), **{name: int(row[name]) for name in SUMMED}) for row in rows]


async def spent_micros(
    connection: AsyncConnection, since: datetime, key_id: str | None = None, tenant_id: str | None = None
) -> int:
    """Of a key or a tenant since the midnight (UTC) at which a budget's period began."""
    day = since.astimezone(UTC).date()
    wanted = UsageFilter(key_id=key_id, tenant_id=tenant_id, first=day)
    return (await sum_usage(connection, wanted))[0].cost_micros


async def high_water_mark(connection: AsyncConnection, gateway_id: str) -> int:
    """Return the number of the gateway before which all events are in the store."""
    return await connection.scalar(_MARK, {"gateway": gateway_id}) or 0


async def known_events(connection: AsyncConnection, ids: Sequence[str]) -> frozenset[str]:
    """Return those of these events, by id, that are in the store: on a bill, or parked as a gateway signed them."""
    billed = select(usage_records.c.id).where(usage_records.c.id.in_(ids))
    parked = select(dead_letters.c.event_id).where(dead_letters.c.event_id.in_(ids))
    found = await connection.execute(billed.union_all(parked))
    return frozenset(str(one) for one in found.scalars())


async def find_sequence_gaps(
    connection: AsyncConnection, gateway_id: str | None = None, limit: int = 1000
) -> Sequence[SequenceGap]:
    """By gateway and number. What is missing after a gateway's last event, nobody here can know."""
    arrived = (
        select(usage_records.c.gateway_id, usage_records.c.seq)
        .join(gateways, gateways.c.id == usage_records.c.gateway_id)
        .where(usage_records.c.seq >= gateways.c.next_seq)
    )
    # the event before the first that is missing is there, whatever its row
    marks = select(gateways.c.id, gateways.c.next_seq - 1)
    if gateway_id is not None:
        arrived, marks = arrived.where(gateways.c.id == gateway_id), marks.where(gateways.c.id == gateway_id)
    known = arrived.union_all(marks).subquery()
    following = func.lead(known.c.seq).over(partition_by=known.c.gateway_id, order_by=known.c.seq)
    steps = select(known.c.gateway_id, known.c.seq, following.label("following")).subquery()
    wanted = (
        select(steps.c.gateway_id, steps.c.seq + 1, steps.c.following - 1)
        .where(steps.c.following > steps.c.seq + 1)
        .order_by(steps.c.gateway_id, steps.c.seq)
        .limit(limit)
    )
    return [SequenceGap(*row) for row in await connection.execute(wanted)]


def user_belongs_to_tenant(user_id: ColumnElement[str], tenant: Any, dialect: str) -> Iterator[ColumnElement[bool]]:
    """The condition that `user_id` is one of the users of `tenant`, beside a join with `users` that says the same.

    An array makes PostgreSQL look up each of them in the index. From the join it expects rows in so many places that it
    reads the whole table, of all tenants. SQLite looks them up anyhow.
    """
    if dialect == "postgresql":
        ids = select(_members.c.id).where(_members.c.tenant_id == tenant).scalar_subquery()
        yield user_id == any_(func.array(ids))


@lru_cache(maxsize=256)
def _summing(by: tuple[str, ...], given: frozenset[str], dialect: str) -> Select:
    """Made once for each form of the question: putting it together would cost more than the database takes."""
    totals, source, known = _source(given, by)
    columns = [known[name].label(name) for name in by]
    sums = [func.coalesce(func.sum(totals.c[name]), 0).label(name) for name in SUMMED]
    statement = select(*columns, *sums).select_from(source).where(*_conditions(given, totals, known["tenant"]))
    if totals is usage_totals and "tenant_id" in given:
        statement = statement.where(*user_belongs_to_tenant(totals.c.user_id, bindparam("tenant_id"), dialect))
    return statement.group_by(*columns).order_by(*columns)


def _source(given: frozenset[str], by: Sequence[str]) -> tuple[Table, FromClause, dict[str, ColumnElement[Any]]]:
    """The totals that are summed, what they are read from, and the groups there. Tenants have totals of their own: what
    is not asked by user or key has far fewer rows."""
    if given.isdisjoint(("user_id", "key_id")) and _COARSE.issuperset(by):
        coarse = tenant_totals.c
        return tenant_totals, tenant_totals, {"day": coarse.day, "model": coarse.model, "tenant": coarse.tenant_id}
    totals = usage_totals
    # a bill without its user is still to be seen
    joined = totals.outerjoin(users, users.c.id == totals.c.user_id)
    known = {"day": totals.c.day, "model": totals.c.model, "key": totals.c.key_id}
    return totals, joined, known | {"tenant": users.c.tenant_id, "user": users.c.email}


def _group(row: RowMapping, by: Sequence[str]) -> dict[str, Any]:
    """A tenant that nobody knows is None, whichever totals say it."""
    return {name: row[name] or None if name == "tenant" else row[name] for name in by}


def _conditions(given: frozenset[str], table: Table, tenant: ColumnElement[Any]) -> Iterator[ColumnElement[bool]]:
    """The values come with the execution, each under the name that UsageFilter has for it."""
    day = table.c.day
    if "first" in given:
        yield day >= bindparam("first", type_=day.type)
    if "last" in given:
        yield day <= bindparam("last", type_=day.type)
    for name in sorted(given - {"first", "last"}):
        column = tenant if name == "tenant_id" else table.c[name]
        yield column == bindparam(name, type_=column.type)
