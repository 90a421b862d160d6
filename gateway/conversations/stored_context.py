"""The stored predecessors and items that a request to the Responses API refers to.

Sizes are checked before anything is read.

A request of a few bytes can refer to stored megabytes, any number of times. The size of
everything that the request refers to is therefore compared first with the limits of a request body,
and each stored response is read and parsed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from llmops.gateway.conversations.items import Item
from llmops.gateway.conversations.response_store import ResponseStore, StoredResponse, encode_json, referenced_item_ids
from llmops.gateway.errors import ContextLengthError, InvalidRequestError, NotFoundError
from llmops.gateway.http.request_body import NON_PROMPT_CHARACTERS, PARSED_BYTES, json_cost
from llmops.gateway.settings import RequestLimits


class StoredContext:
    """A reader of the stored context that one request of `owner` refers to, within `limits`.

    `hold` is called with the bytes of memory that the context takes before the context is read or
    parsed. `hold` may refuse the memory by raising an error.
    """

    def __init__(self, store: ResponseStore, owner: str, limits: RequestLimits, hold: Callable[[int], None]) -> None:
        self._store, self._owner, self._limits, self._hold = store, owner, limits, hold
        self._read: dict[str, StoredResponse] = {}
        self._size = 0
        self._values = 0

    async def items(self, own: Sequence[Item], previous: str | None) -> list[Item]:
        """Return the context of a request: the items of all predecessors, then `own`.

        The oldest predecessor comes first. References are replaced by their items.

        Raises:
            NotFoundError: A predecessor or a referenced item does not exist or belongs to another
                owner.
            InvalidRequestError: The predecessor is still running, or the context exceeds the limits
                of a request body.
            UnavailableError: The gateway's memory for requests is used up.
        """
        before = await self._chain(previous) if previous is not None else []
        return await self._resolved([*before, *own])

    async def _chain(self, previous: str) -> list[Item]:
        links, missing = await self._store.chain(previous, self._owner)
        if missing is not None:
            raise NotFoundError(
                f"Previous response with id '{missing}' not found. Send the whole conversation in 'input', or create "
                "the previous response again with store: true.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._count(sum(link.size for link in links))
        entries = [await self._entry(link.id) for link in reversed(links)]
        if entries[-1].running:
            raise InvalidRequestError(
                f"Previous response with id '{previous}' is still in progress; wait for its end.",
                param="previous_response_id",
            )
        return [item for entry in entries for item in (*entry.items, *entry.response["output"])]

    async def _resolved(self, items: list[Item]) -> list[Item]:
        wanted = Counter(referenced_item_ids(items))
        if not wanted:
            return items
        links = await self._store.find_items(wanted, self._owner)
        self._count(sum(link.size for link in links if link.id not in self._read))
        found: dict[str, Item] = {}
        for link in links:
            entry = await self._entry(link.id)
            for item in (*entry.items, *entry.response["output"]):
                if item.get("id") in wanted and item.get("type") != "item_reference":
                    found[item["id"]] = item
        for item_id, times in wanted.items():
            if item_id not in found:
                raise NotFoundError(f"Item with id '{item_id}' not found; send the item itself.", param="input")
            # The first occurrence was counted with its response.
            text = encode_json(found[item_id])
            self._count(len(text) * (times - 1))
            self._count_text(text, times - 1)
        return [found[str(item["id"])] if item.get("type") == "item_reference" else item for item in items]

    async def _entry(self, response_id: str) -> StoredResponse:
        entry = self._read.get(response_id)
        if entry is None:
            row = await self._store.find(response_id, self._owner)
            if row is None:
                raise NotFoundError(
                    f"Response with id '{response_id}' was deleted just now; send the items that are needed in "
                    "'input'.",
                    param="input",
                )
            self._count_text(row.items)
            self._count_text(row.response)
            entry = self._read[response_id] = row.decoded()
        return entry

    def _count(self, characters: int) -> None:
        characters = max(characters, 0)  # A damaged row may have a negative size.
        self._size += characters
        most = self._limits.prompt_bytes + NON_PROMPT_CHARACTERS
        if self._size > most:
            raise ContextLengthError(
                f"The stored responses that this request refers to have {self._size:,} characters together, and this "
                f"gateway reads at most {most:,}; send the items that are needed in 'input'."
            )
        self._hold(characters)

    def _count_text(self, text: str, times: int = 1) -> None:
        """Count the JSON values of a stored text, and the memory that the values take once parsed.

        `times` is the number of occurrences of the text that are not counted yet.
        """
        cost = json_cost(text) * times
        self._values += cost
        if self._values > self._limits.json_values:
            raise InvalidRequestError(
                "The stored responses that this request refers to hold more JSON values than a request may have "
                f"({self._limits.json_values}); send the items that are needed in 'input'."
            )
        # Counted twice: as items, and as the messages made from the items.
        self._hold(2 * PARSED_BYTES * cost)
