"""Stores of the responses that later requests can refer to.

Only the owner of a response finds it. `MemoryResponses` keeps responses as long as the process
lives; `SqlResponses` (sql_responses.py) keeps them in the store, where every gateway of a
deployment finds them.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from llmops.clocks import utc_now
from llmops.gateway.conversations.items import Item
from llmops.gateway.conversations.response_builder import new_id
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.settings import ResponseStoreSettings

#: Characters of an item's id, which a client may choose and which is the key of an index.
MAX_ITEM_ID_LENGTH = 128


@dataclass(slots=True)
class StoredResponse:
    """A response with the items that were sent for it (not those of its predecessors).

    Attributes:
        owner: The tenant or user that created the response.
        response: The response object as the API shows it.
        items: The input items. A reference to another item is stored as the reference.
        cuts: The sizes of the deltas of each output item, in characters, from which its events are
            made again.
        running: True while a gateway generates the response.
    """

    owner: str
    response: dict[str, Any]
    items: list[Item]
    cuts: list[list[int]] = field(default_factory=list)
    running: bool = False

    @property
    def id(self) -> str:
        return str(self.response["id"])

    def to_row(self, began: datetime | None = None) -> ResponseRecord:
        """Return the response as it is stored."""
        named = (*self.items, *self.response["output"])
        return ResponseRecord(
            id=self.id,
            owner=self.owner,
            previous_id=self.response.get("previous_response_id"),
            running=self.running,
            response=encode_json(self.response),
            items=encode_json(self.items),
            cuts=encode_json(self.cuts),
            began=began,
            item_ids=tuple(item["id"] for item in named if "id" in item and item.get("type") != "item_reference"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """A stored response, encoded: `response`, `items` and `cuts` are JSON.

    `age` is in seconds since the last write; `began` is None for a response that is stored already.
    """

    id: str
    owner: str
    previous_id: str | None
    running: bool
    response: str
    items: str
    cuts: str
    item_ids: tuple[str, ...] = ()
    age: float = 0.0
    began: datetime | None = None

    @property
    def size(self) -> int:
        """The characters that the row counts for."""
        return len(self.response) + len(self.items) + len(self.cuts)

    def decoded(self) -> StoredResponse:
        """Parse the row. Costs about 10 ms per megabyte."""
        return StoredResponse(
            self.owner, json.loads(self.response), json.loads(self.items), json.loads(self.cuts), self.running
        )


@dataclass(frozen=True, slots=True)
class ResponseReference:
    """The id and the size in characters of one response of a chain, before it is read."""

    id: str
    size: int


class ResponseStore(ABC):
    """Stored responses, found by id and owner."""

    #: True if other gateways see the same responses.
    shared = False

    def __init__(self, limits: ResponseStoreSettings) -> None:
        self.limits = limits

    @abstractmethod
    async def put(self, row: ResponseRecord, new: bool = True) -> bool:
        """Write a response, and evict what exceeds the limits.

        Args:
            row: The response in its present state.
            new: Insert the response if it is not stored. Otherwise the response is only replaced.

        Returns:
            False, without a write, if the response or all data of its owner was deleted meanwhile,
                or if it is running and was cancelled.

        Raises:
            UnavailableError: The response could not be stored.
        """

    @abstractmethod
    async def find(self, response_id: str, owner: str) -> ResponseRecord | None:
        """Return the response, or None if the owner has no response of this id."""

    @abstractmethod
    async def find_items(self, item_ids: Iterable[str], owner: str) -> Sequence[ResponseReference]:
        """Return the responses of this owner that hold any of these items, each once."""

    @abstractmethod
    async def chain(self, response_id: str, owner: str) -> tuple[Sequence[ResponseReference], str | None]:
        """Return a response and its predecessors, newest first.

        The second item is the id of a predecessor that is missing, or None.
        """

    @abstractmethod
    async def list(self, owner: str, tenant: str = "") -> Sequence[tuple[str, str]]:
        """Return (id, owner) of all responses of this owner, or of the users of a tenant."""

    @abstractmethod
    async def delete(self, response_id: str, owner: str) -> bool:
        """Delete the response. Returns False if the owner has no response of this id."""

    @abstractmethod
    async def delete_all(self, owner: str, tenant: str = "") -> None:
        """Delete all responses of this owner, or of the users of a tenant, also those that run."""

    async def request_cancellation(self, response_id: str, owner: str) -> None:
        """Ask the gateway that generates the response to stop.

        Does nothing where no other gateway can.
        """
        return

    async def close(self) -> None:
        """Release what the store holds."""
        return


class MemoryResponses(ResponseStore):
    """The responses of this process, bounded in number, size and age.

    Over its bounds it evicts from the owner that holds most, least recently used first: one owner
    cannot evict the responses of another that holds less.
    """

    def __init__(self, limits: ResponseStoreSettings, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(limits)
        self._clock = clock
        self._owners: dict[str, OrderedDict[str, ResponseRecord]] = {}
        self._sizes: dict[str, int] = {}
        self._size = 0
        self._holders: dict[tuple[str, str], str] = {}
        # when each response was last written, oldest first; rewritten and deleted responses leave
        # stale entries
        self._written: deque[tuple[float, str, str]] = deque()
        self._when: dict[str, float] = {}
        # when owners deleted everything, oldest first
        self._purged: dict[str, datetime] = {}

    async def put(self, row: ResponseRecord, new: bool = True) -> bool:
        self._expire()
        purged = self._purged.get(row.owner)
        if (not self._remove(row.owner, row.id) and not new) or (row.began and purged and row.began <= purged):
            return False
        self._owners.setdefault(row.owner, OrderedDict())[row.id] = row
        self._sizes[row.owner] = self._sizes.get(row.owner, 0) + row.size
        self._size += row.size
        for item_id in row.item_ids:
            self._holders[row.owner, item_id] = row.id
        self._when[row.id] = now = self._clock()
        self._written.append((now, row.owner, row.id))
        while len(self) > self.limits.entries or self._size > self.limits.bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._remove(largest, next(iter(self._owners[largest])))
        return True

    async def find(self, response_id: str, owner: str) -> ResponseRecord | None:
        self._expire()
        rows = self._owners.get(owner)
        if rows is None or response_id not in rows:
            return None
        rows.move_to_end(response_id)
        return rows[response_id]

    async def find_items(self, item_ids: Iterable[str], owner: str) -> Sequence[ResponseReference]:
        self._expire()
        found = {self._holders[owner, one] for one in item_ids if (owner, one) in self._holders}
        return [ResponseReference(one, self._owners[owner][one].size) for one in found]

    async def chain(self, response_id: str, owner: str) -> tuple[Sequence[ResponseReference], str | None]:
        links: list[ResponseReference] = []
        wanted: str | None = response_id
        while wanted is not None and len(links) < self.limits.entries:
            row = await self.find(wanted, owner)
            if row is None:
                return links, wanted
            links.append(ResponseReference(row.id, row.size))
            wanted = row.previous_id
        return links, None

    async def list(self, owner: str, tenant: str = "") -> Sequence[tuple[str, str]]:
        # tenants need a store
        self._expire()
        return [] if tenant else [(one, owner) for one in self._owners.get(owner, ())]

    async def delete(self, response_id: str, owner: str) -> bool:
        return self._remove(owner, response_id)

    async def delete_all(self, owner: str, tenant: str = "") -> None:
        if tenant:  # tenants need a store
            return
        self._purged.pop(owner, None)
        self._purged[owner] = utc_now()
        if len(self._purged) > self.limits.entries:
            del self._purged[next(iter(self._purged))]
        for response_id in tuple(self._owners.get(owner, ())):
            self._remove(owner, response_id)

    def __len__(self) -> int:
        return len(self._when)

    def _expire(self) -> None:
        oldest = self._clock() - self.limits.age
        while self._written and self._written[0][0] < oldest:
            when, owner, response_id = self._written.popleft()
            if self._when.get(response_id) == when:
                self._remove(owner, response_id)

    def _remove(self, owner: str, response_id: str) -> bool:
        row = self._owners.get(owner, OrderedDict()).pop(response_id, None)
        if row is None:
            return False
        del self._when[response_id]
        self._sizes[owner] -= row.size
        self._size -= row.size
        for item_id in row.item_ids:
            if self._holders.get((owner, item_id)) == response_id:
                del self._holders[owner, item_id]
        if not self._owners[owner]:
            del self._owners[owner], self._sizes[owner]
        return True


def encode_json(value: object) -> str:
    """Encode `value` compactly, without a character that PostgreSQL's text cannot hold."""
    return json.dumps(value, separators=(",", ":"))


def referenced_item_ids(items: Iterable[Item]) -> Iterator[str]:
    """Yield the id of each reference among `items`, as often as it occurs."""
    for item in items:
        if item.get("type") == "item_reference":
            yield str(item.get("id"))


def ensure_item_id(item: Item, param: str) -> Item:
    """Return the item with an id.

    Raises InvalidRequestError for an id of the client's that cannot be stored.
    """
    given = item.get("id")
    if given is None:
        prefixes = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
        return {**item, "id": new_id(prefixes.get(str(item.get("type")), "msg"))}
    if not isinstance(given, str) or len(given) > MAX_ITEM_ID_LENGTH or not given.isprintable():
        raise InvalidRequestError(
            f"The id of an item must be a printable text of at most {MAX_ITEM_ID_LENGTH} characters.", param=param
        )
    return item
