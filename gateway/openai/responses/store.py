"""Responses that can be referred to later: bounded in number, size and age, and never shown to another owner."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llmops.gateway.errors import NotFoundError
from llmops.gateway.openai.responses.items import Item


@dataclass(slots=True)
class StoredResponse:
    """A response with the items that were sent for it (not those of its predecessors)."""

    owner: str
    response: dict[str, Any]
    items: list[Item]
    cancel: Callable[[], None] | None = None  # while it is being generated
    size: int = field(default=0, compare=False)
    stored_at: float = field(default=0.0, compare=False)

    @property
    def id(self) -> str:
        return str(self.response["id"])


class ResponseStore(ABC):
    """Where responses are kept. `owner` is the tenant: another owner's id does not exist."""

    @abstractmethod
    def put(self, entry: StoredResponse) -> None: ...

    @abstractmethod
    def find(self, response_id: str, owner: str) -> StoredResponse | None: ...

    @abstractmethod
    def find_item(self, item_id: str, owner: str) -> Item | None: ...

    @abstractmethod
    def delete(self, response_id: str, owner: str) -> bool: ...

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """Raises NotFoundError."""
        entry = self.find(response_id, owner)
        if entry is None:
            raise NotFoundError(f"Response with id '{response_id}' not found.", param=param)
        return entry

    def context(self, response_id: str, owner: str) -> list[Item]:
        """The items of the response and of all before it, oldest first; NotFoundError if one is gone."""
        chain: list[StoredResponse] = []
        step: str | None = response_id
        while step is not None:
            entry = self.find(step, owner)
            if entry is None:
                raise NotFoundError(
                    f"Previous response with id '{step}' not found.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            chain.append(entry)
            step = entry.response.get("previous_response_id")
        return [item for entry in reversed(chain) for item in (*entry.items, *entry.response["output"])]


class MemoryStore(ResponseStore):
    """The last ones used, in this process: at most `entries`, `size` characters of JSON and `seconds` of age."""

    def __init__(self, entries: int = 2_000, size: int = 64_000_000, seconds: float = 86_400) -> None:
        self._limits = (entries, size, seconds)
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, str] = {}
        self._size = 0

    def put(self, entry: StoredResponse) -> None:
        self._remove(entry.id)
        entry.size = len(json.dumps([entry.response, entry.items], default=str))
        entry.stored_at = time.monotonic()
        self._entries[entry.id] = entry
        self._items.update((item_id, entry.id) for item_id in _ids(entry))
        self._size += entry.size
        self._shrink()

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            return None
        if time.monotonic() - entry.stored_at > self._limits[2]:
            self._remove(response_id)
            return None
        self._entries.move_to_end(response_id)
        return entry

    def find_item(self, item_id: str, owner: str) -> Item | None:
        entry = self.find(self._items.get(item_id, ""), owner)
        items = [*entry.items, *entry.response["output"]] if entry else []
        return next((item for item in items if item.get("id") == item_id), None)

    def delete(self, response_id: str, owner: str) -> bool:
        return self.find(response_id, owner) is not None and self._remove(response_id)

    def __len__(self) -> int:
        return len(self._entries)

    def _remove(self, response_id: str) -> bool:
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self._size -= entry.size
        for item_id in _ids(entry):
            self._items.pop(item_id, None)
        return True

    def _shrink(self) -> None:
        entries, size, _ = self._limits
        while len(self._entries) > entries or (self._size > size and len(self._entries) > 1):
            self._remove(next(iter(self._entries)))


def _ids(entry: StoredResponse) -> Iterator[str]:
    for item in (*entry.items, *entry.response["output"]):
        if isinstance(item.get("id"), str):
            yield item["id"]
