"""Stores of responses, which later requests can refer to.

Only the owner of a response can find it. `MemoryResponses` keeps responses as long as the process
lives; `SqlResponses` (sql_responses.py) keeps them in the store, where every gateway of a
deployment finds them.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from llmops.clocks import utc_now
from llmops.gateway.conversations.items import Item
from llmops.gateway.conversations.response_builder import new_id
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.settings import ResponseStoreSettings

#: Maximum length of an item's id in characters. A client may choose the id, which is the key of an
#: index.
MAX_ITEM_ID_LENGTH = 128


@dataclass(slots=True)
class StoredResponse:
    """A response with its input items, without the items of its predecessors.

    Attributes:
        owner: The tenant or user that created the response.
        response: The response object as the API shows it.
        items: The input items. A reference to another item is stored as a reference.
        cuts: The sizes of the deltas of each output item in characters, from which its events are
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

    def fail(self, message: str) -> None:
        """Mark the response as failed midway. The output so far stays in the response."""
        for item in self.response["output"]:
            if item.get("status") == "in_progress":
                item["status"] = "incomplete"
        error = {"code": "server_error", "message": message}
        self.response.update(status="failed", error=error, incomplete_details=None)
        self.response.pop("completed_at", None)
        self.running = False

    def to_row(self, began: datetime | None = None, group: str = "") -> ResponseRecord:
        """Return the encoded form of the response for the store.

        Args:
            began: The time when the generation began; None for a response that is already stored.
            group: The owner's `Caller.group`.
        """
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
            group=group,
            item_ids=tuple(item["id"] for item in named if "id" in item and item.get("type") != "item_reference"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """A response in its encoded form, as the store keeps it.

    Attributes:
        id: The id of the response.
        owner: The tenant or user that created the response.
        previous_id: The id of the previous response of the chain, if any.
        running: True while a gateway generates the response.
        response: The response object as JSON.
        items: The input items as JSON.
        cuts: The sizes of the deltas as JSON.
        item_ids: The ids of the items that later requests can refer to.
        age: Seconds since the last write.
        began: The time when the generation began; None for a response that is already stored.
        group: The owner's `Caller.group`, for stores that evict responses of all owners.
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
    group: str = ""

    @property
    def size(self) -> int:
        """Return the size of the row that counts towards the limits, in characters."""
        return len(self.response) + len(self.items) + len(self.cuts)

    def decoded(self) -> StoredResponse:
        """Decode the row, which takes about 10 ms per megabyte."""
        return StoredResponse(
            self.owner, json.loads(self.response), json.loads(self.items), json.loads(self.cuts), self.running
        )


@dataclass(frozen=True, slots=True)
class ResponseReference:
    """A response of a chain by its id and its size in characters, before it is read."""

    id: str
    size: int


class ResponseStore(ABC):
    """An interface to a store of responses, which are found by id and owner."""

    #: True if other gateways see the same responses.
    shared = False

    def __init__(self, limits: ResponseStoreSettings) -> None:
        self.limits = limits

    def excess(self, row: ResponseRecord) -> str:
        """Return the size and the limit of a response that is too large, for a message; else ''."""
        limit = self.limits.item_bytes
        if row.size <= limit:
            return ""
        return f"{row.size:,} characters, and the setting responses.item_bytes allows {limit:,}"

    @abstractmethod
    async def put(self, row: ResponseRecord, new: bool = True) -> bool:
        """Write a response, and evict responses beyond the limits.

        Args:
            row: The response in its current state.
            new: True to insert the response if it is not stored yet; False to only replace a stored
                response.

        Returns:
            False, without a write, if the response or all data of its owner was deleted meanwhile,
                or if it is running and was cancelled.

        Raises:
            UnavailableError: The response could not be stored.
        """

    @abstractmethod
    async def find(self, response_id: str, owner: str) -> ResponseRecord | None:
        """Return the response, or None if the owner has no response with this id."""

    @abstractmethod
    async def find_items(self, item_ids: Iterable[str], owner: str) -> Sequence[ResponseReference]:
        """Return each response of this owner that has any of these items, once."""

    @abstractmethod
    async def chain(self, response_id: str, owner: str) -> tuple[Sequence[ResponseReference], str | None]:
        """Return a response and its predecessors, newest first, and a missing predecessor's id.

        The second value is None if no predecessor is missing.
        """

    @abstractmethod
    async def list(self, owner: str, tenant: str = "") -> Sequence[tuple[str, str]]:
        """Return the id and the owner of each response of this owner, or of all users of a tenant."""

    @abstractmethod
    async def delete(self, response_id: str, owner: str) -> bool:
        """Delete the response. Return False if the owner has no response with this id."""

    @abstractmethod
    async def delete_all(self, owner: str, tenant: str = "") -> None:
        """Delete all responses of this owner or tenant, including running responses."""

    async def request_cancellation(self, response_id: str, owner: str) -> None:
        """Ask the gateway that generates the response to stop.

        The default does nothing, for stores that other gateways do not share.
        """
        return

    async def close(self) -> None:
        """Close the connections of the store."""
        return


class MemoryResponses(ResponseStore):
    """The responses of this process, limited in number, size and age.

    Beyond the limits, the store evicts responses of the group that has the most, and there of the
    owner who has the most, the least recently used first. Owners with few responses keep them,
    however many others store.
    """

    def __init__(self, limits: ResponseStoreSettings, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(limits)
        self._clock = clock
        self._owners: dict[str, OrderedDict[str, ResponseRecord]] = {}
        self._sizes: dict[str, int] = {}
        self._groups: dict[str, str] = {}
        self._size = 0
        self._holders: dict[tuple[str, str], str] = {}
        # Write times of responses, oldest first. Responses that were rewritten or deleted leave
        # stale entries.
        self._written: deque[tuple[float, str, str]] = deque()
        self._when: dict[str, float] = {}
        # Times at which owners deleted all of their responses, oldest first.
        self._purged: dict[str, datetime] = {}

    async def put(self, row: ResponseRecord, new: bool = True) -> bool:
        self._expire()
        purged = self._purged.get(row.owner)
        if (not self._remove(row.owner, row.id) and not new) or (row.began and purged and row.began <= purged):
            return False
        self._owners.setdefault(row.owner, OrderedDict())[row.id] = row
        self._groups[row.owner] = row.group or row.owner
        self._sizes[row.owner] = self._sizes.get(row.owner, 0) + row.size
        self._size += row.size
        for item_id in row.item_ids:
            self._holders[row.owner, item_id] = row.id
        self._when[row.id] = now = self._clock()
        self._written.append((now, row.owner, row.id))
        while len(self) > self.limits.entries:
            self._evict({owner: len(rows) for owner, rows in self._owners.items()})
        while self._size > self.limits.bytes:
            self._evict(self._sizes)
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
        # Tenants exist only with a store, so `tenant` is ignored here.
        self._expire()
        return [] if tenant else [(one, owner) for one in self._owners.get(owner, ())]

    async def delete(self, response_id: str, owner: str) -> bool:
        return self._remove(owner, response_id)

    async def delete_all(self, owner: str, tenant: str = "") -> None:
        if tenant:  # Tenants exist only with a store, so `tenant` is ignored here.
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

    def _evict(self, amounts: Mapping[str, int]) -> None:
        """Evict a response, the least recently used of the owner who has the most.

        The owner is chosen from the group that has the most. `amounts` has the number or size of
        the responses of each owner, whichever exceeds its limit.
        """
        groups: Counter[str] = Counter()
        for owner, amount in amounts.items():
            groups[self._groups[owner]] += amount
        largest = max(amounts, key=lambda owner: (groups[self._groups[owner]], amounts[owner]))
        self._remove(largest, next(iter(self._owners[largest])))

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
            del self._owners[owner], self._sizes[owner], self._groups[owner]
        return True


def encode_json(value: object) -> str:
    """Encode `value` as compact JSON without characters that PostgreSQL's text cannot hold."""
    return json.dumps(value, separators=(",", ":"))


def referenced_item_ids(items: Iterable[Item]) -> Iterator[str]:
    """Yield the id of each reference among `items`, as often as the reference occurs."""
    for item in items:
        if item.get("type") == "item_reference":
            yield str(item.get("id"))


def ensure_item_id(item: Item, param: str) -> Item:
    """Return the item, with a new id if the item has no id.

    Raises:
        InvalidRequestError: The id that the client chose cannot be stored. `param` names the field.
    """
    given = item.get("id")
    if given is None:
        prefixes = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
        return {**item, "id": new_id(prefixes.get(str(item.get("type")), "msg"))}
    if not isinstance(given, str) or len(given) > MAX_ITEM_ID_LENGTH or not given.isprintable():
        raise InvalidRequestError(
            f"The id of an item must be a printable string of at most {MAX_ITEM_ID_LENGTH} characters.", param=param
        )
    return item
