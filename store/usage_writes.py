"""Usage written down: each event once, its sums with it, and how far the events of each gateway have come.

Synchronous, and few statements: `Store.transact` does all of a batch in one visit to a thread where that is possible.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import date, datetime, timezone
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, Dialect, String, Table, bindparam, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.store.ids import canonical
from llmops.store.moment import sqlite_text
from llmops.store.tables import gateways, tenant_totals, usage_records, usage_totals, users
from llmops.store.upsert import insert_of

PAGE = 2000
SUMMED = ("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost_micros")
_summands = attrgetter(*SUMMED[1:])


class UsageRecord(NamedTuple):
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


class Written(NamedTuple):
    """How many were `new`; and of each of their gateways the number before which all events are there."""

    new: int
    marks: dict[str, int]


def write_usage(connection: Connection, records: Iterable[UsageRecord]) -> Written:
    """Insert those that are not there yet, add them to the day's sums and move the gateways' marks.

    The rows are locked in one order, so that two writers with the same events do not lock each other out. Raises
    ValueError for an id that is none.
    """
    offered = {canonical(record.id): record for record in records}
    if not offered:
        return Written(0, {})
    insert = _insert_alone if connection.dialect.name == "sqlite" else _insert
    new = insert(connection, offered)
    sums = _summed(offered[one] for one in new)
    if sums:
        _add(connection, usage_totals, sums)
    arrived: dict[str, set[int]] = {}
    for record in offered.values():
        arrived.setdefault(record.gateway_id, set()).add(record.seq)
    marks = {one: _advance(connection, one, seqs) for one, seqs in sorted(arrived.items())}
    # last: all writers of a tenant's usage meet at one row, which they hold until the end of the transaction
    if sums:
        _add(connection, tenant_totals, _of_tenants(connection, sums))
    return Written(len(new), marks)


async def insert_usage(connection: AsyncConnection, records: Iterable[UsageRecord]) -> int:
    """`write_usage` as part of a transaction that is open; how many were new."""
    return (await connection.run_sync(write_usage, records)).new


# -- rows --------------------------------------------------------------------------------------------------------------

_FIELDS = UsageRecord._fields
_AT = _FIELDS.index("created_at")
_KNOWN_ALONE = "SELECT id FROM usage_records WHERE id IN (SELECT value FROM json_each(?))"
_INSERT_ALONE = f"INSERT INTO usage_records ({', '.join(_FIELDS)}) VALUES ({', '.join('?' * len(_FIELDS))})"


def _insert_alone(connection: Connection, offered: Mapping[str, UsageRecord]) -> Sequence[str]:
    """As the one writer that SQLite has: what is there is asked first, and the rest goes to the driver as it is."""
    ids = sorted(offered)
    known = set(connection.exec_driver_sql(_KNOWN_ALONE, (json.dumps(ids),)).scalars())
    new = [one for one in ids if one not in known]
    if new:
        values = ((one, offered[one]) for one in new)
        rows = [(one, *of[1:_AT], sqlite_text(of.created_at), *of[_AT + 1 :]) for one, of in values]
        connection.exec_driver_sql(_INSERT_ALONE, rows)
    return new


def _insert(connection: Connection, offered: Mapping[str, UsageRecord]) -> Sequence[str]:
    """Beside other writers: which are new, PostgreSQL says. A value of its own for each column, and not for each field
    of each row, is what its driver is quick with."""
    ids = sorted(offered)
    columns = [ids, *list(zip(*(offered[one] for one in ids), strict=True))[1:]]
    new: Sequence[str] | None = connection.exec_driver_sql(_INSERT_ARRAYS, tuple(map(list, columns))).scalar()
    return new or ()


_POSTGRES: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]


def _array_of(name: str) -> str:
    kind = usage_records.c[name].type
    # without its length, to which a cast would cut
    return "text[]" if isinstance(kind, String) else f"{kind.compile(_POSTGRES)}[]"


_ARRAYS = ", ".join(f"${number}::{_array_of(name)}" for number, name in enumerate(_FIELDS, 1))
_INSERT_ARRAYS = (
    f"WITH new AS (INSERT INTO usage_records ({', '.join(_FIELDS)}) SELECT * FROM unnest({_ARRAYS}) "
    "ON CONFLICT (id) DO NOTHING RETURNING id::text) SELECT array_agg(id) FROM new"
)


# -- sums --------------------------------------------------------------------------------------------------------------


_Sums = dict[tuple[Any, ...], tuple[int, ...]]


def _summed(new: Iterable[UsageRecord]) -> _Sums:
    """By the primary key of `usage_totals`."""
    return _added(((one.user_id, _day(one), one.model, one.key_id or ""), (1, *_summands(one))) for one in new)


def _of_tenants(connection: Connection, sums: _Sums) -> _Sums:
    """The same by that of `tenant_totals`."""
    rows = connection.execute(_TENANTS, {"some": sorted({user for user, *_ in sums})}).all()
    tenants = {user: tenant for user, tenant in rows}  # noqa: C416  dict() does not know that a row is a pair
    return _added(((tenants.get(user, ""), day, model), some) for (user, day, model, _), some in sums.items())


def _added(summands: Iterable[tuple[tuple[Any, ...], tuple[int, ...]]]) -> _Sums:
    groups: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for key, some in summands:
        groups.setdefault(key, []).append(some)
    return {key: tuple(map(sum, zip(*some, strict=True))) for key, some in groups.items()}


_TENANTS = select(users.c.id, users.c.tenant_id).where(users.c.id.in_(bindparam("some", expanding=True)))


def _add(connection: Connection, table: Table, sums: _Sums) -> None:
    """To the rows of `table`, whose primary keys they are by."""
    names = [*(column.name for column in table.primary_key), *SUMMED]
    rows = [dict(zip(names, (*key, *some), strict=True)) for key, some in sorted(sums.items())]
    connection.execute(_adding(connection.dialect.name, table), rows)


@lru_cache(maxsize=4)
def _adding(dialect: str, table: Table) -> Any:
    statement = insert_of(dialect, table)
    added = {name: table.c[name] + statement.excluded[name] for name in SUMMED}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=added)


def _day(record: UsageRecord) -> date:
    return record.created_at.astimezone(timezone.utc).date()


# -- marks -------------------------------------------------------------------------------------------------------------

_MINE = gateways.c.id == bindparam("gateway")
_LOCKED = select(gateways.c.next_seq).where(_MINE).with_for_update()
_MOVE = gateways.update().where(_MINE).values(next_seq=bindparam("reached"))
_BEHIND = (
    select(usage_records.c.seq)
    .where(usage_records.c.gateway_id == bindparam("gateway"), usage_records.c.seq >= bindparam("mark"))
    .order_by(usage_records.c.seq)
    .limit(bindparam("page"))
)


def _advance(connection: Connection, gateway_id: str, arrived: Container[int]) -> int:
    """Move the mark past all that has come without a gap, `arrived` with it; where it is then."""
    mine = {"gateway": gateway_id}
    mark = connection.scalar(_LOCKED, mine)
    if mark is None:
        first = insert_of(connection.dialect.name, gateways).values(id=gateway_id, next_seq=0)
        connection.execute(first.on_conflict_do_nothing())
        mark = connection.scalar(_LOCKED, mine) or 0
    reached = mark
    while reached in arrived:
        reached += 1
    reached = _unbroken(connection, gateway_id, reached)
    if reached != mark:
        connection.execute(_MOVE, mine | {"reached": reached})
    return reached


def _unbroken(connection: Connection, gateway_id: str, mark: int) -> int:
    """The first number from `mark` on that is not there: page by page, a range of the index each, because an
    anti-join gets a plan that is quadratic while the planner has no statistics."""
    while True:
        seqs = connection.scalars(_BEHIND, {"gateway": gateway_id, "mark": mark, "page": PAGE}).all()
        for seq in seqs:
            if seq > mark:
                return mark
            mark = seq + 1
        if len(seqs) < PAGE:
            return mark
