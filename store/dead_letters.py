"""Dead letters, which are usage events that could not be billed, and the ledger's read attempts.

A row is a value with a reason. Once the table has MAX_ROWS rows, values without a gateway's
signature are only counted, in one row for each reason: a program that can write to the topic must
not be able to fill the disk.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, RowMapping, and_, case, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.store.columns import database_time, insert, sum_of
from llmops.store.damaged_rows import read_undamaged
from llmops.store.tables import dead_letters, ledger_reads

#: Number of rows above which unsigned values are only counted, to bound the disk space of values
#: that any writer to the topic can send.
MAX_ROWS = 10_000
#: Maximum number of bytes stored of an unsigned value. Signed values are stored whole.
MAX_UNSIGNED_BYTES = 2048


@dataclass(frozen=True)
class DeadLetter:
    """A value that could not be billed.

    Attributes:
        reason: A few words from a fixed list, because the reason is a label of a metric.
        source: Where the value came from, such as `topic[partition] at offset`.
        value: The value.
        event_id: The event's id if a gateway signed it. Such an event counts as arrived.
    """

    reason: str
    source: str
    value: bytes
    event_id: str | None = None


class ListedLetter(NamedTuple):
    """A stored dead letter, with the number of its arrivals and the time of the last."""

    id: str
    arrivals: int
    last_at: datetime
    letter: DeadLetter


def add_dead_letters(connection: Connection, parked: Iterable[DeadLetter], at: datetime) -> None:
    """Store each value once, and count how often the value arrived.

    All values are stored in one statement, because other writers of the topic can send records
    faster than one statement each could store.
    """
    letters: dict[str, DeadLetter] = {}
    counts: Counter[str] = Counter()
    for one in parked:
        letters.setdefault(_id(one), one)
        counts[_id(one)] += 1
    unsigned = sorted(row for row, one in letters.items() if one.event_id is None)
    room = MAX_ROWS - (connection.scalar(select(func.count()).select_from(dead_letters)) or 0)
    if len(unsigned) > room:
        known = set(connection.scalars(select(dead_letters.c.id).where(dead_letters.c.event_id.is_(None))))
        for row in [row for row in unsigned if row not in known][max(room, 0) :]:
            one = letters.pop(row)
            shared = hashlib.sha256(one.reason.encode()).hexdigest()
            letters.setdefault(shared, replace(one, value=b""))
            counts[shared] += counts.pop(row)
    rows = [
        {
            "id": row,
            "reason": one.reason,
            "event_id": one.event_id,
            "source": one.source[:255],
            "value": one.value if one.event_id is not None else one.value[:MAX_UNSIGNED_BYTES],
            "count": counts[row],
            "first_at": at,
            "last_at": at,
        }
        for row, one in sorted(letters.items())
    ]
    if rows:
        statement = insert(connection, dead_letters)
        # The last batch is read again after a restart before its commit, and counts once.
        again = dead_letters.c.source == statement.excluded.source
        raised = {
            "count": dead_letters.c.count + case((again, 0), else_=statement.excluded.count),
            "source": statement.excluded.source,
            "last_at": at,
        }
        connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=raised), rows)


async def count_dead_letters(connection: AsyncConnection) -> dict[str, int]:
    """Return the number of dead letters by reason."""
    counted = sum_of(dead_letters.c.count, connection.dialect.name)
    counts = select(dead_letters.c.reason, counted).group_by(dead_letters.c.reason)
    return {reason: int(count) for reason, count in await connection.execute(counts)}


async def list_dead_letters(
    connection: AsyncConnection, limit: int, after: ListedLetter | None = None
) -> Sequence[ListedLetter]:
    """Return dead letters, signed letters before others and the newest first.

    This order keeps a program that can write to the topic from pushing a gateway's events off the
    list. A dead letter with a damaged value is left out and logged.

    Args:
        connection: A connection to the store.
        limit: Maximum number of dead letters.
        after: The last dead letter of the previous page, or None for the first page.
    """
    columns = dead_letters.c
    unsigned = columns.event_id.is_(None)
    statement = select(
        columns.id, columns.count, columns.last_at, columns.reason, columns.source, columns.value, columns.event_id
    )
    if after is not None:
        same = and_(columns.last_at == after.last_at, columns.id > after.id)
        older = or_(columns.last_at < after.last_at, same)
        following = or_(unsigned, older) if after.letter.event_id is not None else and_(unsigned, older)
        statement = statement.where(following)
    statement = statement.order_by(unsigned, columns.last_at.desc(), columns.id)
    return await read_undamaged(connection, statement, _letter, "dead letter", columns.id, limit)


def _letter(row: RowMapping) -> ListedLetter:
    letter = DeadLetter(row["reason"], row["source"], row["value"], row["event_id"])
    return ListedLetter(row["id"], row["count"], row["last_at"], letter)


async def prune_dead_letters(connection: AsyncConnection, before: datetime) -> int:
    """Delete values that have not arrived since `before`. Return the number deleted."""
    old = dead_letters.c.last_at < database_time(connection, before)
    return (await connection.execute(delete(dead_letters).where(old))).rowcount


def _id(one: DeadLetter) -> str:
    return hashlib.sha256(one.reason.encode() + b"\0" + one.value).hexdigest()


def record_read_attempt(connection: Connection, topic: str, partition: int, offset: int) -> int:
    """Record that a process begins to read the topic at `offset`.

    Returns:
        The number of processes that began at the same offset before, and crashed there.
    """
    columns = ledger_reads.c
    here = (columns.topic == topic, columns.partition == partition)
    found = connection.execute(select(columns.offset, columns.deaths).where(*here)).first()
    begun = found.deaths if found is not None and found.offset == offset else 0
    values = {"topic": topic, "partition": partition, "offset": offset, "deaths": begun + 1}
    statement = insert(connection, ledger_reads).values(values)
    changed = {"offset": offset, "deaths": begun + 1}
    connection.execute(statement.on_conflict_do_update(index_elements=["topic", "partition"], set_=changed))
    return begun


def clear_read_attempts(connection: Connection, topic: str) -> None:
    """Delete the recorded read attempts, because reading has advanced."""
    connection.execute(delete(ledger_reads).where(ledger_reads.c.topic == topic))
