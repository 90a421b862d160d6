"""Stored responses in the store (SQLite or PostgreSQL), where every gateway of a deployment finds them.

The only file of this room that imports the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.clocks import utc_now, within
from llmops.errors import LlmopsError
from llmops.gateway.conversations.store import Link, ResponseStore, Row
from llmops.gateway.errors import UnavailableError
from llmops.gateway.settings import StoredResponses
from llmops.store import responses as table
from llmops.store.open import LazyStore

T = TypeVar("T")

# Seconds that a request waits for the store before it counts as away.
PATIENCE = 5.0


class SqlResponses(ResponseStore):
    """Responses in the store at `url`. `limits` hold for each owner."""

    shared = True

    def __init__(self, url: str, limits: StoredResponses, now: Callable[[], datetime] = utc_now) -> None:
        super().__init__(limits)
        self._store, self._now = LazyStore(url, pool_size=2), now

    async def put(self, row: Row, new: bool = True) -> bool:
        kept = table.ResponseRow(
            id=row.id,
            owner=row.owner,
            previous_id=row.previous,
            running=row.running,
            cancelled=False,
            written_at=self._now(),
            size=row.size,
            response=row.response,
            items=row.items,
            cuts=row.cuts,
        )

        async def work(connection: AsyncConnection) -> bool:
            written = await table.put_response(connection, kept, row.item_ids, new)
            if written and not row.running:
                limits = self.limits
                await table.evict_responses(connection, row.owner, self._since(), limits.entries, limits.bytes)
            return written

        return await self._write(work)

    async def find(self, response_id: str, owner: str) -> Row | None:
        since = self._since()
        found = await self._read(lambda connection: table.find_response(connection, response_id, owner, since))
        if found is None:
            return None
        return Row(
            id=found.id,
            owner=found.owner,
            previous=found.previous_id,
            running=found.running,
            response=found.response,
            items=found.items,
            cuts=found.cuts,
            age=(self._now() - found.written_at).total_seconds(),
        )

    async def find_items(self, item_ids: Iterable[str], owner: str) -> Sequence[Link]:
        wanted, since = list(item_ids), self._since()
        found = await self._read(lambda connection: table.find_holders(connection, wanted, owner, since))
        return [Link(response_id, size) for response_id, size in found]

    async def chain(self, response_id: str, owner: str) -> tuple[Sequence[Link], str | None]:
        since, limit = self._since(), self.limits.entries
        found = await self._read(lambda connection: table.response_chain(connection, response_id, owner, since, limit))
        missing = found[-1][2] if found else response_id
        return [Link(one, size) for one, size, _ in found], missing

    async def delete(self, response_id: str, owner: str) -> bool:
        return await self._write(lambda connection: table.delete_response(connection, response_id, owner))

    async def ask_to_cancel(self, response_id: str, owner: str) -> None:
        await self._write(lambda connection: table.cancel_response(connection, response_id, owner))

    async def close(self) -> None:
        await self._store.close()

    def _since(self) -> datetime:
        return self._now() - timedelta(seconds=self.limits.age)

    async def _read(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        return await _answered(self._within(self._store.read, work))

    async def _write(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        return await _answered(self._within(self._store.write, work))

    async def _within(
        self,
        connect: Callable[[], AbstractAsyncContextManager[AsyncConnection]],
        work: Callable[[AsyncConnection], Awaitable[T]],
    ) -> T:
        async with connect() as connection:
            return await work(connection)


async def _answered(work: Awaitable[T]) -> T:
    """Turn every failure of the store, and its silence for `PATIENCE`, into an UnavailableError."""
    try:
        return await within(PATIENCE, work)
    except (LlmopsError, SQLAlchemyError, asyncio.TimeoutError) as error:
        detail = error.message if isinstance(error, LlmopsError) else type(error).__name__
        raise UnavailableError(
            "Stored responses cannot be read or written now; try again, or send store: false.",
            code="responses_unavailable",
            detail=detail,
        ) from error
