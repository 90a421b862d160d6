"""Where the ledger reads a topic: an offset that ends its process again and again is found by it."""

from __future__ import annotations

from sqlalchemy import Connection, delete, select

from llmops.store.tables import ledger_reads
from llmops.store.upsert import insert


def record_read_attempt(connection: Connection, topic: str, partition: int, offset: int) -> int:
    """Note that a process reads from `offset` on.

    Returns:
        The number of processes that began at this offset before and neither came further nor ended well.
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
    """Forget where reading of the topic began."""
    connection.execute(delete(ledger_reads).where(ledger_reads.c.topic == topic))
