"""Stored responses in SQLite or PostgreSQL.

All gateways of a deployment that use the store find the same responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.clocks import utc_now
from llmops.gateway.conversations.database import Database
from llmops.gateway.conversations.response_store import ResponseRecord, ResponseReference, ResponseStore
from llmops.gateway.settings import ResponseStoreSettings
from llmops.store import responses as table

#: Columns that are equal to attributes of ResponseRecord.
_COLUMNS = ("id", "owner", "previous_id", "running", "response", "items", "cuts")

#: Time after which a deletion of all responses is forgotten: longer than any answer runs, so that
#: no running answer is stored after the deletion.
PURGE_MEMORY = timedelta(days=1)


class SqlResponses(ResponseStore):
    """The responses in the store at `url`. The `limits` apply to each owner alone."""

    shared = True

    def __init__(self, url: str, limits: ResponseStoreSettings, now: Callable[[], datetime] = utc_now) -> None:
        super().__init__(limits)
        self._database, self._now = Database(url, "Stored responses", "send store: false"), now

    async def put(self, row: ResponseRecord, new: bool = True) -> bool:
        kept = {name: getattr(row, name) for name in _COLUMNS}
        kept |= {"cancelled": False, "written_at": self._now(), "size": row.size}

        async def work(connection: AsyncConnection) -> bool:
            written = await table.put_response(connection, kept, row.item_ids, new, row.began)
            if written and not row.running:
                limits = self.limits
                await table.evict_responses(connection, row.owner, self._since(), limits.entries, limits.bytes)
            return written

        return await self._database.write(work)

    async def find(self, response_id: str, owner: str) -> ResponseRecord | None:
        since = self._since()
        found = await self._database.read(
            lambda connection: table.find_response(connection, response_id, owner, since), owner
        )
        if found is None:
            return None
        age = (self._now() - found["written_at"]).total_seconds()
        return ResponseRecord(**{name: found[name] for name in _COLUMNS}, age=age)

    async def find_items(self, item_ids: Iterable[str], owner: str) -> Sequence[ResponseReference]:
        wanted, since = list(item_ids), self._since()
        found = await self._database.read(
            lambda connection: table.find_responses_with_items(connection, wanted, owner, since), owner
        )
        return [ResponseReference(response_id, size) for response_id, size in found]

    async def chain(self, response_id: str, owner: str) -> tuple[Sequence[ResponseReference], str | None]:
        since, limit = self._since(), self.limits.entries
        found = await self._database.read(
            lambda connection: table.response_chain(connection, response_id, owner, since, limit), owner
        )
        missing = found[-1][2] if found else response_id
        return [ResponseReference(one, size) for one, size, _ in found], missing

    async def list(self, owner: str, tenant: str = "") -> Sequence[tuple[str, str]]:
        return await self._database.read(lambda connection: table.list_responses(connection, owner, tenant), owner)

    async def delete(self, response_id: str, owner: str) -> bool:
        return await self._database.write(lambda connection: table.delete_response(connection, response_id, owner))

    async def request_cancellation(self, response_id: str, owner: str) -> None:
        await self._database.write(lambda connection: table.cancel_response(connection, response_id, owner))

    async def delete_all(self, owner: str, tenant: str = "") -> None:
        now = self._now()
        mark = partial(table.note_purge, owner=owner, tenant_id=tenant, purged_at=now, forget=now - PURGE_MEMORY)
        await self._database.write(mark)
        await self._database.write(partial(table.delete_responses, owner=owner, tenant_id=tenant))

    async def close(self) -> None:
        await self._database.close()

    def _since(self) -> datetime:
        return self._now() - timedelta(seconds=self.limits.age)
