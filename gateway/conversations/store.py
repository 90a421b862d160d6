"""Responses that can be referred to later, by their owner only. All workers of a gateway see the same ones."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llmops.gateway.conversations.items import Item
from llmops.gateway.conversations.table import ResponseTable, Row
from llmops.gateway.errors import InvalidRequestError, NotFoundError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class StoredResponse:
    """A response with the items that were sent for it (not those of its predecessors).

    `cuts` are the sizes of the deltas of each output item, from which its events can be made again; `worker` is where
    it is being generated, None when that is over.
    """

    owner: str
    response: dict[str, Any]
    items: list[Item]
    cuts: list[list[int]] = field(default_factory=list)
    worker: str | None = None

    @property
    def id(self) -> str:
        return str(self.response["id"])

    def to_row(self) -> Row:
        # one item at a time: encoding holds the GIL, and others get it in between
        items = ",".join([_json(item) for item in self.items])
        body = f"[{_json(self.response)},[{items}],{_json(self.cuts)}]"
        return Row(self.id, self.owner, self.response.get("previous_response_id"), self.worker, body)

    @classmethod
    def of(cls, row: Row) -> StoredResponse:
        response, items, cuts = json.loads(row.body)
        return cls(row.owner, response, items, cuts, row.worker)

    def item_ids(self) -> Iterator[str]:
        for item in (*self.items, *self.response["output"]):
            if isinstance(item.get("id"), str):
                yield item["id"]


class ResponseStore:
    """The table on its own thread: calls run in the order in which they were made."""

    def __init__(self, table: ResponseTable) -> None:
        self._table = table
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llmops-responses")

    async def put(self, entry: StoredResponse) -> None:
        """Failures are only logged: an answer must not fail because it cannot be stored."""
        await asyncio.wrap_future(self.put_soon(entry))

    def put_soon(self, entry: StoredResponse) -> Future[None]:
        """The same without waiting. `entry` must not change afterwards."""
        return self._thread.submit(self._put, entry)

    async def get(self, response_id: str, owner: str) -> StoredResponse:
        """Raises NotFoundError, for another owner's response as well."""
        entry = await self._run(lambda: _read(self._table.find(response_id, owner)))
        if entry is None:
            raise NotFoundError(f"Response with id '{response_id}' not found.")
        return entry

    async def find_item(self, item_id: str, owner: str) -> Item | None:
        entry = await self._run(lambda: _read(self._table.find_by_item(item_id, owner)))
        if entry is None:
            return None
        return next((item for item in (*entry.items, *entry.response["output"]) if item.get("id") == item_id), None)

    async def context(self, response_id: str, owner: str) -> list[Item]:
        """The items of the response and of all before it, oldest first.

        Raises NotFoundError if one is gone and InvalidRequestError if the last is not complete yet.
        """
        entries, missing = await self._run(lambda: self._chain(response_id, owner))
        if missing is not None:
            raise NotFoundError(
                f"Previous response with id '{missing}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if entries[-1].worker is not None:
            raise InvalidRequestError(
                f"Previous response with id '{response_id}' is still in progress.", param="previous_response_id"
            )
        return [item for entry in entries for item in (*entry.items, *entry.response["output"])]

    async def delete(self, response_id: str, owner: str) -> bool:
        return await self._run(lambda: self._table.delete(response_id, owner))

    def close(self) -> None:
        """Pending calls still complete."""
        self._thread.submit(self._table.close)
        self._thread.shutdown(wait=True)

    def _chain(self, response_id: str, owner: str) -> tuple[list[StoredResponse], str | None]:
        rows, missing = self._table.chain(response_id, owner)
        return [StoredResponse.of(row) for row in rows], missing

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(work))

    def _put(self, entry: StoredResponse) -> None:
        try:
            self._table.put(entry.to_row(), entry.item_ids())
        except sqlite3.Error as error:
            log.warning("response %s could not be stored: %s", entry.id, error)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _read(row: Row | None) -> StoredResponse | None:
    return None if row is None else StoredResponse.of(row)
