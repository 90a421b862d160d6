"""Usage of a tenant in buckets of time.

Days are read from the totals, hours and minutes from the records.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Select, Table, func, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from llmops.store.columns import sum_of
from llmops.store.tables import SUMMED, tenant_totals, usage_records, usage_totals, users
from llmops.store.usage_queries import MANY_ROWS, UsageSum, has_valid_day, user_belongs_to_tenant

DAY = 86_400


@dataclass(frozen=True)
class BucketSum:
    """The usage in the bucket that begins at `begins` (Unix seconds).

    `sum.group` has ids of users and keys, and names of models.
    """

    begins: int
    sum: UsageSum


class _Seconds(FunctionElement[int]):
    """The SQL expression of a time in whole Unix seconds, rounded down."""

    type = BigInteger()
    inherit_cache = True


@compiles(_Seconds, "sqlite")
def _sqlite_seconds(element: Any, compiler: Any, **kw: Any) -> str:
    # cut the microseconds off, because SQLite rounds them to milliseconds, perhaps up to the next
    # second
    return f"CAST(strftime('%s', substr({compiler.process(element.clauses, **kw)}, 1, 19)) AS INTEGER)"


@compiles(_Seconds, "postgresql")
def _postgresql_seconds(element: Any, compiler: Any, **kw: Any) -> str:
    return f"CAST(floor(extract(epoch FROM {compiler.process(element.clauses, **kw)})) AS BIGINT)"


async def bucket_sums(
    connection: AsyncConnection,
    tenant_id: str,
    begins: int,
    ends: int,
    width: int,
    by: Sequence[str] = (),
    only: Mapping[str, Sequence[str]] = {},
) -> Sequence[BucketSum]:
    """Return the usage of a tenant in buckets, without empty buckets.

    Args:
        connection: A connection to the store.
        tenant_id: The tenant.
        begins: Start of the first bucket in Unix seconds, a multiple of `width`.
        ends: End of the last bucket in Unix seconds.
        width: Width of a bucket in seconds.
        by: Groups within a bucket: `user`, `key`, `model`.
        only: Ids of the users or keys, or names of the models, to include, by the name of the
            group.
    """
    dialect = connection.dialect.name
    columns = {*by, *(name for name, values in only.items() if values)}
    if width == DAY:
        statement = _sum_days(tenant_id, begins, ends, by, only, columns <= {"model"}, dialect)
    else:
        statement = _sum_records(tenant_id, begins, ends, width, by, only, dialect)
    rows = (await connection.execute(statement)).mappings().all()

    def sums() -> list[BucketSum]:
        return [
            BucketSum(
                _bucket_start(row["bucket"], width),
                UsageSum({name: row[name] for name in by}, **{name: int(row[name]) for name in SUMMED}),
            )
            for row in rows
            if row["bucket"] is not None  # a damaged time
        ]

    return sums() if len(rows) < MANY_ROWS else await asyncio.to_thread(sums)


def _sum_days(
    tenant_id: str,
    begins: int,
    ends: int,
    by: Sequence[str],
    only: Mapping[str, Sequence[str]],
    coarse: bool,
    dialect: str,
) -> Select:
    table: Table = tenant_totals if coarse else usage_totals
    first, last = _to_datetime(begins).date(), _to_datetime(ends - 1).date()
    sums = [sum_of(table.c[name], dialect).label(name) for name in SUMMED]
    statement = _grouped(table, table.c.day, sums, by, only).where(table.c.day >= first, table.c.day <= last)
    statement = statement.where(*has_valid_day(table.c.day, dialect))
    if coarse:
        return statement.where(tenant_totals.c.tenant_id == tenant_id)
    statement = statement.join(users, users.c.id == table.c.user_id).where(users.c.tenant_id == tenant_id)
    return statement.where(*user_belongs_to_tenant(table.c.user_id, tenant_id, dialect))


def _sum_records(
    tenant_id: str,
    begins: int,
    ends: int,
    width: int,
    by: Sequence[str],
    only: Mapping[str, Sequence[str]],
    dialect: str,
) -> Select:
    at = usage_records.c.created_at
    sums = [
        func.count().label("requests"),
        *(sum_of(usage_records.c[name], dialect).label(name) for name in SUMMED[1:]),
    ]
    statement = _grouped(usage_records, _Seconds(at) // width, sums, by, only)
    statement = statement.where(at >= _to_datetime(begins), at < _to_datetime(ends))
    return statement.join(users, users.c.id == usage_records.c.user_id).where(users.c.tenant_id == tenant_id)


def _grouped(
    table: Table,
    bucket: ColumnElement[Any],
    sums: Sequence[ColumnElement[Any]],
    by: Sequence[str],
    only: Mapping[str, Sequence[str]],
) -> Select:
    names = {"user": "user_id", "key": "key_id", "model": "model"}
    groups = [bucket.label("bucket"), *(table.c[names[name]].label(name) for name in by)]
    statement = select(*groups, *sums).select_from(table)
    for name, values in only.items():
        if values:
            statement = statement.where(table.c[names[name]].in_(values))
    labels = [group.name for group in groups]
    return statement.group_by(*labels).order_by(*labels)


def _to_datetime(seconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


def _bucket_start(bucket: Any, width: int) -> int:
    if width == DAY:
        return int(datetime(bucket.year, bucket.month, bucket.day, tzinfo=UTC).timestamp())
    return int(bucket) * width
