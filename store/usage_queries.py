"""Queries of usage: sums per day, and gaps in gateways' event numbers."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, FromClause, RowMapping, Select, Table, any_, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.store.columns import sum_of
from llmops.store.tables import SUMMED, dead_letters, gateways, tenant_totals, usage_records, usage_totals, users
from llmops.store.usage_writes import MAX_SEQUENCE, MAX_SEQUENCE_LEAD

GROUPS = ("day", "tenant", "user", "model", "key")
_COARSE = frozenset({"day", "tenant", "model"})
_members = users.alias("members")

#: Number of rows from which sums are made in a thread, because a report with a hundred thousand
#: rows would block the event loop.
MANY_ROWS = 500

#: Maximum number of gaps that one query returns, so that a lost outbox cannot fill a report.
MAX_SEQUENCE_GAPS = 1000


@dataclass(frozen=True)
class UsageFilter:
    """A selection of usage by tenant, user, model, key and UTC days. None selects all.

    The days from `first` to `last` are selected, both included.
    """

    tenant_id: str | None = None
    user_id: str | None = None
    model: str | None = None
    key_id: str | None = None
    first: date | None = None
    last: date | None = None


@dataclass(frozen=True)
class UsageSum:
    """Sums of usage in one group.

    `group` maps each requested group to its value: a date or a name.
    """

    group: dict[str, Any]
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost_micros: int


@dataclass(frozen=True, order=True)
class SequenceGap:
    """A range of missing events, `first` to `last`, of a gateway that has sent later events."""

    gateway_id: str
    first: int
    last: int


async def sum_usage(
    connection: AsyncConnection, usage_filter: UsageFilter, by: Sequence[str] = ()
) -> Sequence[UsageSum]:
    """Return the sums of usage in each group, ordered by the groups.

    Args:
        connection: A connection to the store.
        usage_filter: The usage to sum.
        by: Names of groups, from GROUPS. Without groups, one sum is returned.
    """
    filters = {name: value for name, value in vars(usage_filter).items() if value is not None}
    statement = _sum_statement(tuple(by), frozenset(filters), connection.dialect.name)
    rows = (await connection.execute(statement, filters)).mappings().all()

    def sums() -> list[UsageSum]:
        return [UsageSum(group=_group(row, by), **{name: int(row[name]) for name in SUMMED}) for row in rows]

    return sums() if len(rows) < MANY_ROWS else await asyncio.to_thread(sums)


async def spent_micros(
    connection: AsyncConnection, since: datetime, key_id: str | None = None, tenant_id: str | None = None
) -> int:
    """Return the cost of a key or a tenant since the beginning of a budget's period.

    `since` is the midnight (UTC) at which the period began.
    """
    day = since.astimezone(UTC).date()
    usage_filter = UsageFilter(key_id=key_id, tenant_id=tenant_id, first=day)
    return (await sum_usage(connection, usage_filter))[0].cost_micros


async def known_events(connection: AsyncConnection, ids: Sequence[str]) -> frozenset[str]:
    """Return the ids, among `ids`, of the events that are in the store.

    Such events are billed, or are dead letters that a gateway signed.
    """
    billed = select(usage_records.c.id).where(usage_records.c.id.in_(ids))
    parked = select(dead_letters.c.event_id).where(dead_letters.c.event_id.in_(ids))
    found = await connection.execute(billed.union_all(parked))
    return frozenset(str(one) for one in found.scalars())


async def high_water_mark(connection: AsyncConnection, gateway_id: str) -> int:
    """Return the number before which the store has all events of a gateway."""
    found = await connection.scalar(select(gateways.c.next_seq).where(gateways.c.id == gateway_id))
    # SQLite stores values of any type
    return found if isinstance(found, int) else 0


async def find_sequence_gaps(connection: AsyncConnection) -> Sequence[SequenceGap]:
    """Return at most MAX_SEQUENCE_GAPS gaps in event numbers, ordered by gateway and number.

    The first gaps of each gateway precede later ones, so that a gateway with many hides no other.
    Events lost after a gateway's last stored event cannot be detected. A jump by more than
    MAX_SEQUENCE_LEAD does not count as a gap; see `usage_writes`.
    """
    arrived = (
        select(usage_records.c.gateway_id, usage_records.c.seq)
        .join(gateways, gateways.c.id == usage_records.c.gateway_id)
        .where(usage_records.c.seq.between(gateways.c.next_seq, MAX_SEQUENCE))
    )
    # the event before a high-water mark has arrived, whichever table has its row
    marks = select(gateways.c.id, gateways.c.next_seq - 1)
    known = arrived.union_all(marks).subquery()
    following = func.lead(known.c.seq).over(partition_by=known.c.gateway_id, order_by=known.c.seq)
    steps = select(known.c.gateway_id, known.c.seq, following.label("following")).subquery()
    statement = (
        select(steps.c.gateway_id, steps.c.seq + 1, steps.c.following - 1)
        .where(steps.c.following.between(steps.c.seq + 2, steps.c.seq + MAX_SEQUENCE_LEAD))
        .order_by(func.row_number().over(partition_by=steps.c.gateway_id, order_by=steps.c.seq), steps.c.gateway_id)
        .limit(MAX_SEQUENCE_GAPS)
    )
    rows = await connection.execute(statement)
    # SQLite stores values of any type
    return sorted(SequenceGap(str(gateway), int(first), int(last)) for gateway, first, last in rows)


def user_belongs_to_tenant(user_id: ColumnElement[str], tenant: Any, dialect: str) -> Iterator[ColumnElement[bool]]:
    """Yield the condition that `user_id` is a user of `tenant`.

    Add the condition to a join with `users` that implies the same condition. With the condition,
    PostgreSQL looks up each user of the tenant in the index. With the join alone, PostgreSQL
    expects too many rows and reads the whole table, of all tenants. SQLite uses the index without
    the condition.
    """
    if dialect == "postgresql":
        ids = select(_members.c.id).where(_members.c.tenant_id == tenant).scalar_subquery()
        yield user_id == any_(func.array(ids))


def has_valid_day(day: ColumnElement[date], dialect: str) -> Iterator[ColumnElement[bool]]:
    """Yield the condition that `day` is a date, because SQLite stores any text."""
    if dialect == "sqlite":
        yield func.date(day, type_=day.type) == day


@lru_cache(maxsize=256)
def _sum_statement(by: tuple[str, ...], filters: frozenset[str], dialect: str) -> Select:
    """Return the statement for a set of groups and filters.

    Cached, because composing the statement takes longer than running it.
    """
    totals, source, known = _source(filters, by)
    columns = [known[name].label(name) for name in by]
    sums = [func.coalesce(sum_of(totals.c[name], dialect), 0).label(name) for name in SUMMED]
    statement = select(*columns, *sums).select_from(source).where(*_conditions(filters, totals, known["tenant"]))
    if totals is usage_totals and "tenant_id" in filters:
        statement = statement.where(*user_belongs_to_tenant(totals.c.user_id, bindparam("tenant_id"), dialect))
    if "day" in by:
        statement = statement.where(*has_valid_day(totals.c.day, dialect))
    return statement.group_by(*columns).order_by(*columns)


def _source(filters: frozenset[str], by: Sequence[str]) -> tuple[Table, FromClause, dict[str, ColumnElement[Any]]]:
    """Return the summed table, the FROM clause, and the columns of the groups.

    Queries that need neither users nor keys read the totals of tenants, which have far fewer rows.
    """
    if filters.isdisjoint(("user_id", "key_id")) and _COARSE.issuperset(by):
        coarse = tenant_totals.c
        return tenant_totals, tenant_totals, {"day": coarse.day, "model": coarse.model, "tenant": coarse.tenant_id}
    totals = usage_totals
    # an outer join, because usage of an unknown user is billed too
    joined = totals.outerjoin(users, users.c.id == totals.c.user_id)
    known = {"day": totals.c.day, "model": totals.c.model, "key": totals.c.key_id}
    return totals, joined, known | {"tenant": users.c.tenant_id, "user": users.c.email}


def _group(row: RowMapping, by: Sequence[str]) -> dict[str, Any]:
    """Return the groups of a row. An unknown tenant is None, whichever table is read."""
    return {name: row[name] or None if name == "tenant" else row[name] for name in by}


def _conditions(filters: frozenset[str], table: Table, tenant: ColumnElement[Any]) -> Iterator[ColumnElement[bool]]:
    """Yield an SQL condition for each filter in `filters`, which are fields of UsageFilter.

    The values are bound at execution, by the names of the fields.
    """
    day = table.c.day
    if "first" in filters:
        yield day >= bindparam("first", type_=day.type)
    if "last" in filters:
        yield day <= bindparam("last", type_=day.type)
    for name in sorted(filters - {"first", "last"}):
        column = tenant if name == "tenant_id" else table.c[name]
        yield column == bindparam(name, type_=column.type)
