"""Usage in a store, written and read as tests need it."""

from collections.abc import Iterable, Sequence

from sqlalchemy import RowMapping, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.store.database import Store
from llmops.store.factory import open_store
from llmops.store.tables import usage_records
from llmops.store.usage_writes import UsageRecord, write_usage


async def insert_usage(connection: AsyncConnection, records: Iterable[UsageRecord]) -> int:
    """Do `write_usage` in an open transaction. Return the number of new events."""
    return (await connection.run_sync(write_usage, records)).new


async def fill(url: str, *records: UsageRecord) -> None:
    """Write records into the store at `url`."""
    async with await open_store(url) as store, store.write() as connection:
        await insert_usage(connection, records)


async def billed_rows(store: Store) -> Sequence[RowMapping]:
    """Return all events that the store has."""
    async with store.read() as connection:
        return (await connection.execute(select(usage_records))).mappings().all()
