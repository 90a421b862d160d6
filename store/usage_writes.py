"""Writing of usage: each event once, with its sums and its gateway's high-water mark.

The functions are synchronous, so that `Store.transact` runs a whole batch in one thread.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, case, select, update

from llmops.store.columns import DAMAGED, MAX_SUM, canonical_uuid, insert
from llmops.store.tables import (
    SUMMED,
    api_keys,
    gateways,
    tenant_totals,
    usage_records,
    usage_totals,
    users,
)
from llmops.untrusted_text import escape_unsafe

log = logging.getLogger(__name__)
#: The log of jumps in the numbers of events, which whoever writes events can repeat without end.
jump_log = logging.getLogger(f"{__name__}.jumps")

GAP_PAGE_SIZE = 2000
#: Finish reason of the part of an answer that is billed because the answer's gateway was lost.
GATEWAY_LOST = "gateway_lost"
#: Maximum number of an event. JSON readers represent integers up to this value exactly.
MAX_SEQUENCE = 2**53 - 1
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


#: Records to add (1) to the sums or to subtract (-1) from them.
_Changes = Sequence[tuple[int, UsageRecord]]


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
    tenants = select(users.c.id, users.c.tenant_id).where(users.c.id.in_({one.user_id for one in records}))
    owners = select(api_keys.c.id, api_keys.c.user_id).where(api_keys.c.id.in_({one.key_id or "" for one in records}))
    return RecordOwners(*(dict(connection.execute(found).all()) for found in (tenants, owners)))


def write_usage(
    connection: Connection, records: Iterable[UsageRecord], owners: RecordOwners | None = None
) -> WriteResult:
    """Insert the records that are not in the store yet, and update their sums and high-water marks.

    The record of a whole answer replaces that of the part which another gateway billed because it
    took the answer's gateway for lost. Rows are locked in one order, so that two writers of the
    same events do not deadlock.

    Raises:
        ValueError: An id is not a UUID.
    """
    records = list(records)
    # A whole answer replaces its part in a batch, too.
    ordered = sorted(records, key=lambda record: record.finish_reason != GATEWAY_LOST)
    offered = {canonical_uuid(record.id): record for record in ordered}
    if not offered:
        return WriteResult(0, {})
    new = _insert(connection, offered)
    changes = [(1, offered[one]) for one in new]
    if known := {one: offered[one] for one in offered.keys() - set(new)}:
        changes += _replace_parts(connection, known)
    if changes:
        _add(connection, usage_totals, _sum_by_key(changes))
    arrived: dict[str, set[int]] = {}
    for record in records:
        arrived.setdefault(record.gateway_id, set()).add(record.seq)
    marks = {one: _advance_high_water_mark(connection, one, seqs) for one, seqs in sorted(arrived.items())}
    # last, because all writers of a tenant's usage wait for this row until the end of the
    # transaction
    if changes:
        owners = owners or find_record_owners(connection, [record for _, record in changes])
        _add(connection, tenant_totals, _sum_by_tenant(owners, changes))
    return WriteResult(len(new), marks)


# -- rows


def _insert(connection: Connection, offered: Mapping[str, UsageRecord]) -> Sequence[str]:
    """Insert records, and return the ids of the new records."""
    rows = [offered[one]._replace(id=one)._asdict() for one in sorted(offered)]
    for row in rows:
        del row["tenant_id"]
    statement = insert(connection, usage_records).on_conflict_do_nothing().returning(usage_records.c.id)
    new: Sequence[str] = connection.execute(statement, rows).scalars().all()
    return new


def _replace_parts(connection: Connection, offered: Mapping[str, UsageRecord]) -> _Changes:
    """Replace the stored parts of the answers in `offered`, and return the changes of the sums.

    The number and the time of a part stay: its gateway's events are counted by their numbers, and
    its day may be invoiced already.
    """
    this, changes = usage_records.c, []
    is_part = this.finish_reason == GATEWAY_LOST
    for one in connection.scalars(select(this.id).where(is_part, this.id.in_(offered)).order_by(this.id)).all():
        whole, stored = offered[one], select(usage_records).where(is_part, this.id == one).with_for_update()
        try:
            row = connection.execute(stored).mappings().first()
            if row is None or row["output_tokens"] >= whole.output_tokens:
                continue
            part = UsageRecord(**row, tenant_id=whole.tenant_id)
            # SQLite stores values of any type.
            sum(_summands(part))
        except DAMAGED:
            log.error("The usage record %s is damaged, so its answer is billed in part only.", escape_unsafe(one))
            continue
        whole = whole._replace(id=one, gateway_id=part.gateway_id, seq=part.seq, created_at=part.created_at)
        changes += [(1, whole), (-1, part)]
        values = whole._asdict()
        del values["tenant_id"]
        connection.execute(update(usage_records).where(this.id == one).values(values))
    return changes


# -- sums


_Sums = dict[tuple[Any, ...], tuple[int, ...]]
_summands = attrgetter(*SUMMED[1:])


def _sum_by_key(changes: _Changes) -> _Sums:
    """Return sums by the primary key of `usage_totals`."""
    return _group_sums(((one.user_id, _day(one), one.model, one.key_id or ""), sign, one) for sign, one in changes)


def _sum_by_tenant(owners: RecordOwners, changes: _Changes) -> _Sums:
    """Return sums by the primary key of `tenant_totals`.

    The usage of an unknown user counts for the tenant that the event names.
    """
    return _group_sums(
        ((owners.tenants.get(one.user_id, one.tenant_id), _day(one), one.model), sign, one) for sign, one in changes
    )


def _group_sums(changes: Iterable[tuple[tuple[Any, ...], int, UsageRecord]]) -> _Sums:
    groups: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for key, sign, record in changes:
        groups.setdefault(key, []).append((sign, *(sign * value for value in _summands(record))))
    return {key: tuple(min(sum(column), MAX_SUM) for column in zip(*some, strict=True)) for key, some in groups.items()}


def _add(connection: Connection, table: Table, sums: _Sums) -> None:
    """Add sums to the rows of `table`. The keys of `sums` are primary keys."""
    names = [*(column.name for column in table.primary_key), *SUMMED]
    rows = [dict(zip(names, row, strict=True)) for row in sorted((*key, *some) for key, some in sums.items())]
    statement = insert(connection, table)
    # SQLite stores values of any type: a damaged sum begins again at 0, as reports count it
    kept = {name: case((table.c[name].between(0, MAX_SUM), table.c[name]), else_=0) for name in SUMMED}
    added = {
        name: case(
            (kept[name] > MAX_SUM - statement.excluded[name], MAX_SUM), else_=kept[name] + statement.excluded[name]
        )
        for name in SUMMED
    }
    connection.execute(statement.on_conflict_do_update(index_elements=table.primary_key, set_=added), rows)


def _day(record: UsageRecord) -> date:
    return record.created_at.astimezone(UTC).date()


# -- high-water marks


def _advance_high_water_mark(connection: Connection, gateway_id: str, arrived: set[int]) -> int:
    """Advance the high-water mark past all events without a gap, and return the mark.

    A number more than MAX_SEQUENCE_LEAD ahead begins a new count, so that a gap is never reported
    as quadrillions of missing events.
    """
    this = gateways.c.id == gateway_id
    locked = select(gateways.c.next_seq).where(this).with_for_update()
    stored = connection.scalar(locked)
    if stored is None:
        connection.execute(insert(connection, gateways).values(id=gateway_id, next_seq=0).on_conflict_do_nothing())
        stored = connection.scalar(locked) or 0
    # SQLite stores values of any type: after a damaged mark, the events are counted again
    mark = reached = stored if isinstance(stored, int) and stored >= 0 else 0
    far = [seq for seq in arrived if seq > mark + MAX_SEQUENCE_LEAD]
    if far:
        reached = min(far)
        jump_log.error(
            "The event numbers of gateway %s jump from %d to %d. The gap is not reported as missing events.",
            escape_unsafe(gateway_id), mark, reached,
        )  # fmt: skip
    while reached in arrived:
        reached += 1
    reached = _first_missing_sequence(connection, gateway_id, reached)
    if reached != stored:
        connection.execute(update(gateways).where(this).values(next_seq=reached))
    return reached


def _first_missing_sequence(connection: Connection, gateway_id: str, mark: int) -> int:
    """Return the first missing event number that is not smaller than `mark`.

    Numbers are read in pages, because an anti-join gets a quadratic plan while the planner has no
    statistics.
    """
    columns = usage_records.c
    numbers = select(columns.seq).where(columns.gateway_id == gateway_id).order_by(columns.seq).limit(GAP_PAGE_SIZE)
    while True:
        # SQLite stores values of any type, and a text is above all numbers
        seqs = connection.scalars(numbers.where(columns.seq.between(mark, MAX_SEQUENCE))).all()
        for seq in seqs:
            if seq > mark:
                return mark
            mark = seq + 1
        if len(seqs) < GAP_PAGE_SIZE:
            return mark
