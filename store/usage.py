"""What was used: one row per request, sums per day, and which events of a gateway have not arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timezone
from functools import lru_cache
from operator import attrgetter
from typing import Any

from sqlalchemy import ColumnElement, Dialect, FromClause, RowMapping, Select, Table, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.store.ids import canonical
from llmops.store.tables import gateways, tenant_totals, usage_records, usage_totals, users
from llmops.store.upsert import insert, insert_of

PAGE = 2000
GROUPS = ("day", "tenant", "user", "model", "key")
_COARSE = frozenset({"day", "tenant", "model"})
_COLUMNS = usage_records.columns.keys()
_AT, _VALUES = _COLUMNS.index("created_at"), attrgetter(*_COLUMNS)
_SUMMED = ("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost_micros")
_MINE = gateways.c.id == bindparam("gateway")
_MARK = select(gateways.c.next_seq).where(_MINE)
_LOCKED = _MARK.with_for_update()
_MOVE = gateways.update().where(_MINE).values(next_seq=bindparam("reached"))
_SUMMANDS = attrgetter(*_SUMMED[1:])


@dataclass(frozen=True)
class UsageRecord:
    """One request as it is billed. `id` is the event's (a UUID), by which it is inserted once.

    `seq` counts the events of one gateway from 0. `input_tokens` include the cached ones.
    """

    id: str
    gateway_id: str
    seq: int
    created_at: datetime
    request_id: str
    user_id: str
    model: str
    input_tokens: int
    output_tokens: int
    cost_micros: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    key_id: str | None = None
    price_id: str | None = None
    version: str | None = None
    replica: str | None = None
    status: int = 200
    finish_reason: str | None = None
    ttft_ms: int | None = None
    latency_ms: int | None = None
    priority: str | None = None
    migrations: int = 0


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
class Gap:
    """Events `first` to `last` of a gateway have not arrived, while a later one has."""

    gateway_id: str
    first: int
    last: int


async def insert_usage(connection: AsyncConnection, records: Iterable[UsageRecord]) -> int:
    """Insert those that are not there yet, add them to the day's sums and move the gateways' marks; how many were new.

    The rows are locked in one order, so that two writers with the same events do not lock each other out.
    """
    offered = {canonical(record.id): record for record in records}
    if not offered:
        return 0
    new = await (_insert_alone if connection.dialect.name == "sqlite" else _insert)(connection, offered)
    added = [offered[one] for one in new]
    await _add_to_totals(connection, added)
    for gateway_id in sorted({record.gateway_id for record in offered.values()}):
        await _advance(connection, gateway_id)
    # last: all writers of a tenant's usage meet at one row, which they hold until the end of the transaction
    await _add_to_tenants(connection, added)
    return len(new)


async def sum_usage(connection: AsyncConnection, wanted: UsageFilter, by: Sequence[str] = ()) -> Sequence[UsageSum]:
    """Sums by the groups of `by` (of `GROUPS`), in their order. Without groups it is one sum, perhaps of zeros."""
    given = {name: value for name, value in vars(wanted).items() if value is not None}
    rows = (await connection.execute(_summing(tuple(by), frozenset(given)), given)).mappings().all()
    return [UsageSum(group=_group(row, by), **{name: int(row[name]) for name in _SUMMED}) for row in rows]


async def spent_micros(
    connection: AsyncConnection, since: datetime, key_id: str | None = None, tenant_id: str | None = None
) -> int:
    """Of a key or a tenant since the midnight (UTC) at which a budget's period began."""
    day = since.astimezone(timezone.utc).date()
    wanted = UsageFilter(key_id=key_id, tenant_id=tenant_id, first=day)
    return (await sum_usage(connection, wanted))[0].cost_micros


async def next_seq(connection: AsyncConnection, gateway_id: str) -> int:
    """Every event of the gateway with a smaller number is in the store: its journal may forget them."""
    return await connection.scalar(_MARK, {"gateway": gateway_id}) or 0


async def gaps(connection: AsyncConnection, gateway_id: str | None = None, limit: int = 1000) -> Sequence[Gap]:
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
    return [Gap(*row) for row in await connection.execute(wanted)]


async def _insert(connection: AsyncConnection, offered: Mapping[str, UsageRecord]) -> Sequence[str]:
    """Beside other writers: which are new, the database says."""
    rows = [vars(offered[one]) | {"id": one} for one in sorted(offered)]
    statement = insert(connection, usage_records).on_conflict_do_nothing(index_elements=["id"])
    return (await connection.execute(statement.returning(usage_records.c.id), rows)).scalars().all()


async def _insert_alone(connection: AsyncConnection, offered: Mapping[str, UsageRecord]) -> Sequence[str]:
    """As the one writer that SQLite has: what is there is asked first, and the rest goes to the driver as it is."""
    ordered, known = sorted(offered), set[str]()
    for start in range(0, len(ordered), PAGE):
        wanted = select(usage_records.c.id).where(usage_records.c.id.in_(ordered[start : start + PAGE]))
        known.update((await connection.execute(wanted)).scalars())
    new = [one for one in ordered if one not in known]
    if new:
        statement, moment = _plain_insert(connection.dialect)
        rows = []
        for one in new:
            values = _VALUES(offered[one])
            rows.append((one, *values[1:_AT], moment(values[_AT]), *values[_AT + 1 :]))
        await connection.exec_driver_sql(statement, rows)
    return new


@lru_cache(maxsize=4)
def _plain_insert(dialect: Dialect) -> tuple[str, Callable[[datetime], Any]]:
    """Of all columns; and what the driver takes for a time."""
    moment = usage_records.c.created_at.type.dialect_impl(dialect).bind_processor(dialect)
    assert moment is not None
    return str(usage_records.insert().compile(dialect=dialect)), moment


async def _add_to_totals(connection: AsyncConnection, new: Sequence[UsageRecord]) -> None:
    await _add(connection, usage_totals, ((one, (one.user_id, _day(one), one.model, one.key_id or "")) for one in new))


async def _add_to_tenants(connection: AsyncConnection, new: Sequence[UsageRecord]) -> None:
    wanted = select(users.c.id, users.c.tenant_id).where(users.c.id.in_(sorted({one.user_id for one in new})))
    rows = (await connection.execute(wanted)).all() if new else []
    tenants = {user: tenant for user, tenant in rows}  # noqa: C416  dict() does not know that a row is a pair
    await _add(connection, tenant_totals, ((one, (tenants.get(one.user_id, ""), _day(one), one.model)) for one in new))


async def _add(connection: AsyncConnection, table: Table, new: Iterable[tuple[UsageRecord, tuple[Any, ...]]]) -> None:
    """Each record to the row of `table` with the primary key that comes with it."""
    summands: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for record, key in new:
        summands.setdefault(key, []).append(_SUMMANDS(record))
    if not summands:
        return
    keys = [column.name for column in table.primary_key]
    rows = [
        dict(zip((*keys, *_SUMMED), (*key, len(some), *map(sum, zip(*some, strict=True))), strict=True))
        for key, some in sorted(summands.items())
    ]
    await connection.execute(_adding(connection.dialect.name, table), rows)


@lru_cache(maxsize=4)
def _adding(dialect: str, table: Table) -> Any:
    statement = insert_of(dialect, table)
    added = {name: table.c[name] + statement.excluded[name] for name in _SUMMED}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=added)


def _day(record: UsageRecord) -> date:
    return record.created_at.astimezone(timezone.utc).date()


async def _advance(connection: AsyncConnection, gateway_id: str) -> None:
    """Move the mark past all that has arrived without a gap."""
    mine = {"gateway": gateway_id}
    mark = await connection.scalar(_LOCKED, mine)
    if mark is None:
        first = insert(connection, gateways).values(id=gateway_id, next_seq=0).on_conflict_do_nothing()
        await connection.execute(first)
        mark = await connection.scalar(_LOCKED, mine)
    reached = await _unbroken(connection, gateway_id, mark or 0)
    if reached != mark:
        await connection.execute(_MOVE, mine | {"reached": reached})


async def _unbroken(connection: AsyncConnection, gateway_id: str, mark: int) -> int:
    """The first number from `mark` on that is not there: page by page, a range of the index each, because an
    anti-join gets a plan that is quadratic while the planner has no statistics."""
    records = usage_records.c
    while True:
        page = select(records.seq).where(records.gateway_id == gateway_id, records.seq >= mark)
        seqs = (await connection.execute(page.order_by(records.seq).limit(PAGE))).scalars().all()
        for seq in seqs:
            if seq > mark:
                return mark
            mark = seq + 1
        if len(seqs) < PAGE:
            return mark


@lru_cache(maxsize=256)
def _summing(by: tuple[str, ...], given: frozenset[str]) -> Select:
    """Made once for each form of the question: putting it together would cost more than the database takes."""
    totals, source, known = _source(given, by)
    columns = [known[name].label(name) for name in by]
    sums = [func.coalesce(func.sum(totals.c[name]), 0).label(name) for name in _SUMMED]
    statement = select(*columns, *sums).select_from(source).where(*_conditions(given, totals, known["tenant"]))
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
