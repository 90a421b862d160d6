"""Writing of usage: each event once, with its sums and its gateway's high-water mark.

The functions are synchronous, so that `Store.transact` runs a whole batch in one thread. Statements
are text: most batches have few rows, and composing statements with SQLAlchemy took most of their
time. Placeholders are SQLite's and are translated for PostgreSQL.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import lru_cache
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple

from pydantic_core import to_json
from sqlalchemy import Connection, CursorResult, Dialect, String, Table
from sqlalchemy.dialects import postgresql

from llmops.store.columns import canonical_uuid, sqlite_timestamp
from llmops.store.tables import SUMMED, tenant_totals, usage_records, usage_totals
from llmops.untrusted_text import escape_unsafe

log = logging.getLogger(__name__)

GAP_PAGE_SIZE = 2000
#: Maximum number of an event. JSON readers represent integers up to this value exactly.
MAX_SEQUENCE = 2**53 - 1
#: Maximum of a sum in a row of the totals. A thousand such rows add up to less than 2**63, above
#: which a database's sum would fail or become a float.
MAX_SUM = MAX_SEQUENCE
#: Maximum distance of an event's number from the high-water mark: fifty times the window of
#: unconfirmed events. After a larger jump (a ledger restored from a backup), counting continues
#: after the gap.
MAX_SEQUENCE_LEAD = 1_000_000


class UsageRecord(NamedTuple):
    """A billed request.

    `id` is the event's UUID, which makes repeated inserts harmless. `seq` numbers the events of a
    gateway from 0. `input_tokens` includes cached tokens. `tenant_id` is not stored: this tenant is
    billed if the store does not know the user.
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
    tenant_id: str = ""


class RecordOwners(NamedTuple):
    """The owners known to the store: the tenant of each user, and the user of each key."""

    tenants: Mapping[str, str]
    users: Mapping[str, str]


class WriteResult(NamedTuple):
    """The result of a write: the number of new events, and each gateway's high-water mark."""

    new: int
    marks: dict[str, int]


def find_record_owners(connection: Connection, records: Sequence[UsageRecord]) -> RecordOwners:
    """Return the known owners of the users and keys in some records."""
    users = _read_pairs(connection, "users", "tenant_id", sorted({one.user_id for one in records}))
    return RecordOwners(
        users, _read_pairs(connection, "api_keys", "user_id", sorted({one.key_id or "" for one in records}))
    )


def write_usage(
    connection: Connection, records: Iterable[UsageRecord], owners: RecordOwners | None = None
) -> WriteResult:
    """Insert the records that are not in the store yet, and update their sums and high-water marks.

    Rows are locked in one order, so that two writers of the same events do not deadlock.

    Raises:
        ValueError: An id is not a UUID.
    """
    offered = {canonical_uuid(record.id): record for record in records}
    if not offered:
        return WriteResult(0, {})
    insert = _insert_as_only_writer if connection.dialect.name == "sqlite" else _insert
    new = insert(connection, offered)
    sums = _sum_by_key(offered[one] for one in new)
    if sums:
        _add(connection, usage_totals, sums)
    arrived: dict[str, set[int]] = {}
    for record in offered.values():
        arrived.setdefault(record.gateway_id, set()).add(record.seq)
    marks = {one: _advance_high_water_mark(connection, one, seqs) for one, seqs in sorted(arrived.items())}
    # last, because all writers of a tenant's usage wait for this row until the end of the
    # transaction
    if new:
        fresh = [offered[one] for one in new]
        _add(connection, tenant_totals, _sum_by_tenant(owners or find_record_owners(connection, fresh), fresh))
    return WriteResult(len(new), marks)


# -- rows

_FIELDS = tuple(name for name in UsageRecord._fields if name != "tenant_id")
_WIDTH = len(_FIELDS)
_summands = itemgetter(*map(_FIELDS.index, SUMMED[1:]))
_AT = _FIELDS.index("created_at")
_INSERT_SQLITE = (
    f"INSERT INTO usage_records ({', '.join(_FIELDS)}) VALUES ({', '.join('?' * len(_FIELDS))}) "
    "ON CONFLICT (id) DO NOTHING"
)
_LAST_SQLITE = "SELECT id FROM usage_records ORDER BY rowid DESC LIMIT ?"


def _insert_as_only_writer(connection: Connection, offered: Mapping[str, UsageRecord]) -> Sequence[str]:
    """Insert records as SQLite's only writer, and return the ids of the new records.

    The new records are the last rows of the table, because nothing else writes. The ids of these
    rows are read only if some records were not new.
    """
    ids = sorted(offered)
    rows = [(one, *(of := offered[one])[1:_AT], sqlite_timestamp(of.created_at), *of[_AT + 1 : _WIDTH]) for one in ids]
    new = connection.exec_driver_sql(_INSERT_SQLITE, rows).rowcount
    return ids if new == len(ids) else connection.exec_driver_sql(_LAST_SQLITE, (new,)).scalars().all()


def _insert(connection: Connection, offered: Mapping[str, UsageRecord]) -> Sequence[str]:
    """Insert records beside other writers, and return the ids of the new records.

    The rows are passed as one JSON text, because asyncpg takes longer to encode a value than
    PostgreSQL to parse it.
    """
    rows = [(one, *offered[one][1:_WIDTH]) for one in sorted(offered)]
    new: Sequence[str] | None = connection.exec_driver_sql(_INSERT_JSON, (to_json(rows).decode(),)).scalar()
    return new or ()


_POSTGRES: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]


def _type_of(name: str) -> str:
    kind = usage_records.c[name].type
    # a type without a length, because a cast to a length would truncate instead of failing
    return "text" if isinstance(kind, String) else kind.compile(_POSTGRES)


_VALUES = ", ".join(f"(one->>{place})::{_type_of(name)}" for place, name in enumerate(_FIELDS))
_INSERT_JSON = (
    f"WITH new AS (INSERT INTO usage_records ({', '.join(_FIELDS)}) "
    f"SELECT {_VALUES} FROM jsonb_array_elements($1::text::jsonb) AS offered(one) "
    "ON CONFLICT (id) DO NOTHING RETURNING id::text) SELECT array_agg(id) FROM new"
)


# -- sums


_Sums = dict[tuple[Any, ...], tuple[int, ...]]


def _sum_by_key(new: Iterable[UsageRecord]) -> _Sums:
    """Return sums by the primary key of `usage_totals`."""
    return _group_sums(((one.user_id, _day(one), one.model, one.key_id or ""), (1, *_summands(one))) for one in new)


def _sum_by_tenant(owners: RecordOwners, new: Iterable[UsageRecord]) -> _Sums:
    """Return sums by the primary key of `tenant_totals`.

    The usage of an unknown user counts for the tenant that the event names.
    """
    return _group_sums(
        ((owners.tenants.get(one.user_id, one.tenant_id), _day(one), one.model), (1, *_summands(one))) for one in new
    )


def _read_pairs(connection: Connection, table: str, column: str, ids: Sequence[str]) -> dict[str, str]:
    if connection.dialect.name == "sqlite":
        statement = f"SELECT id, {column} FROM {table} WHERE id IN (SELECT value FROM json_each(?))"
        rows = connection.exec_driver_sql(statement, (json.dumps(ids),))
    else:
        kind = "uuid" if table == "users" else "text"
        rows = _execute(
            connection, f"SELECT id::text, {column}::text FROM {table} WHERE id = ANY(?::{kind}[])", list(ids)
        )
    return {one: of for one, of in rows}  # noqa: C416  dict() does not know that a row is a pair


def _group_sums(summands: Iterable[tuple[tuple[Any, ...], tuple[int, ...]]]) -> _Sums:
    groups: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for key, some in summands:
        groups.setdefault(key, []).append(some)
    return {key: tuple(min(sum(column), MAX_SUM) for column in zip(*some, strict=True)) for key, some in groups.items()}


def _add(connection: Connection, table: Table, sums: _Sums) -> None:
    """Add sums to the rows of `table`. The keys of `sums` are primary keys."""
    rows = sorted((*key, *some) for key, some in sums.items())
    if connection.dialect.name == "sqlite":
        rows = [tuple(one.isoformat() if isinstance(one, date) else one for one in row) for row in rows]
    connection.exec_driver_sql(_with_placeholders(connection.dialect.name, _add_statement(table)), rows)


@lru_cache(maxsize=4)
def _add_statement(table: Table) -> str:
    keys = ", ".join(column.name for column in table.primary_key)
    names, values = f"{keys}, {', '.join(SUMMED)}", ", ".join("?" * (len(table.primary_key) + len(SUMMED)))
    added = ", ".join(
        f"{name} = CASE WHEN {table.name}.{name} > {MAX_SUM} - excluded.{name} THEN {MAX_SUM} "
        f"ELSE {table.name}.{name} + excluded.{name} END"
        for name in SUMMED
    )
    return f"INSERT INTO {table.name} ({names}) VALUES ({values}) ON CONFLICT ({keys}) DO UPDATE SET {added}"


def _day(record: UsageRecord) -> date:
    return record.created_at.astimezone(UTC).date()


# -- high-water marks

_MARK = "SELECT next_seq FROM gateways WHERE id = ?"
_LOCKED = f"{_MARK} FOR UPDATE"
_BEGIN = "INSERT INTO gateways (id, next_seq) VALUES (?, 0) ON CONFLICT DO NOTHING"
_MOVE = "UPDATE gateways SET next_seq = ? WHERE id = ?"
_NEXT_NUMBERS = "SELECT seq FROM usage_records WHERE gateway_id = ? AND seq >= ? ORDER BY seq LIMIT ?"


def _advance_high_water_mark(connection: Connection, gateway_id: str, arrived: set[int]) -> int:
    """Advance the high-water mark past all events without a gap, and return the mark.

    A number more than MAX_SEQUENCE_LEAD ahead begins a new count, so that a gap is never reported
    as quadrillions of missing events.
    """
    # SQLite has one writer and no row locks
    locked = _MARK if connection.dialect.name == "sqlite" else _LOCKED
    stored = _execute(connection, locked, gateway_id).scalar()
    if stored is None:
        _execute(connection, _BEGIN, gateway_id)
        stored = _execute(connection, locked, gateway_id).scalar() or 0
    # SQLite stores values of any type: after a damaged mark, the events are counted again
    mark = reached = stored if isinstance(stored, int) and stored >= 0 else 0
    far = [seq for seq in arrived if seq > mark + MAX_SEQUENCE_LEAD]
    if far:
        reached = min(far)
        log.error(
            "The event numbers of gateway %s jump from %d to %d. The gap is not reported as missing events.",
            escape_unsafe(gateway_id), mark, reached,
        )  # fmt: skip
    while reached in arrived:
        reached += 1
    reached = _first_missing_sequence(connection, gateway_id, reached)
    if reached != stored:
        _execute(connection, _MOVE, reached, gateway_id)
    return reached


def _first_missing_sequence(connection: Connection, gateway_id: str, mark: int) -> int:
    """Return the first missing event number that is not smaller than `mark`.

    Numbers are read in pages, because an anti-join gets a quadratic plan while the planner has no
    statistics.
    """
    while True:
        seqs = _execute(connection, _NEXT_NUMBERS, gateway_id, mark, GAP_PAGE_SIZE).scalars().all()
        for seq in seqs:
            if seq > mark:
                return mark
            mark = seq + 1
        if len(seqs) < GAP_PAGE_SIZE:
            return mark


# -- statements


def _execute(connection: Connection, statement: str, *values: Any) -> CursorResult[Any]:
    return connection.exec_driver_sql(_with_placeholders(connection.dialect.name, statement), values)


@lru_cache(maxsize=64)
def _with_placeholders(dialect: str, statement: str) -> str:
    """Return a statement with the driver's placeholders: `?`, or `$1`, `$2` and so on."""
    numbers = count(1)
    return statement if dialect == "sqlite" else re.sub(r"\?", lambda _: f"${next(numbers)}", statement)
