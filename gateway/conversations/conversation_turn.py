"""One turn of a conversation: its history for the model, and its messages for the store."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from pydantic import BaseModel

from llmops.gateway.conversations.chat_run import ChatRun
from llmops.gateway.conversations.conversation_store import (
    Branch,
    ConversationStore,
    message_from_item,
    message_items,
    public_id,
    searchable_text,
)
from llmops.gateway.conversations.items import to_messages
from llmops.gateway.conversations.response_store import StoredResponse
from llmops.gateway.errors import InvalidRequestError, NotFoundError
from llmops.gateway.interfaces import Caller, Usage
from llmops.store.conversations import NewMessage, StoredMessage
from llmops.store.usage_writes import GATEWAY_LOST

Price = Callable[[str, Usage], int | None]
_ANSWER_ITEM_ID = re.compile(r"msg_([0-9a-f]{24})")


class ConversationTurn:
    """New messages of a conversation and the answer to them.

    Attributes:
        history: The chat messages for the model: the system prompt, the branch that the turn
            follows, and the new messages.
    """

    def __init__(
        self,
        store: ConversationStore,
        caller: Caller,
        branch: Branch,
        new: Sequence[dict[str, Any]],
        price: Price,
        continues: bool = False,
    ) -> None:
        """Prepare a turn.

        Args:
            store: The store of conversations.
            caller: The owner of the conversation.
            branch: The branch that the turn follows.
            new: The new chat messages. A system message at their beginning replaces the system
                prompt.
            price: Returns the price of a model's usage in micro-dollars; None for a model without a
                price.
            continues: True to continue the last answer of the branch, without new messages.

        Raises:
            InvalidRequestError: The branch has no message to answer or no answer to continue.
        """
        self.store, self._caller, self._branch, self._price = store, caller, branch, price
        settled = _finished_messages(branch.messages)
        last = settled[-1] if settled else None
        self._continued = last if continues else None
        system = branch.conversation.system_prompt
        self._system = None
        if new and new[0]["role"] in ("system", "developer"):
            self._system = system = str(new[0].get("content") or "")
            new = new[1:]
        self._new = new
        if continues and (new or last is None or last.role != "assistant" or last.items is not None):
            raise InvalidRequestError(
                "continue_final_message continues the last answer of a conversation: send no messages, and name a "
                "plain answer with `after`.",
                param="continue_final_message",
            )
        if not continues and not new and (last is None or last.role == "assistant"):
            raise InvalidRequestError("There is no message to answer; send one in 'messages'.", param="messages")
        items = [item for message in settled for item in message_items(message)]
        self.history = [*to_messages(items, system), *new]
        self._row: StoredMessage | None = None

    @property
    def conversation_id(self) -> str:
        return public_id(self._branch.conversation)

    @property
    def first_question(self) -> str:
        """Return the first message's text for a conversation without a title, else an empty text."""
        if self._branch.every or self._branch.conversation.title is not None:
            return ""
        return next((_text(message) for message in self._new if message["role"] == "user"), "")

    @property
    def run_id(self) -> str:
        """Return the id of the answer: derived from the continued message, or new."""
        found = _ANSWER_ITEM_ID.fullmatch(self._continued.item_id) if self._continued is not None else None
        return f"chatcmpl-{found[1] if found else secrets.token_hex(12)}"

    async def begin(self, run_id: str, model: str, after: str | None) -> dict[str, Any]:
        """Store the new messages and the unfinished answer.

        Return the description of the messages for the first event.

        Args:
            run_id: The id of the answer.
            model: The model's name.
            after: The message that the turn follows; None for the newest message, which another
                browser tab may have written since the history was read.
        """
        store, key = self.store, self.conversation_id
        if self._continued is not None:
            await store.check_room(self._caller)
            self._row = replace(self._continued, status="in_progress", finish_reason=None)
            await store.save(self._caller, key, self._row)
            return {"id": key, "message_id": self._row.item_id, "continues": True}
        rows = [row for message in self._new for row in _to_rows(message)]
        answer = NewMessage(
            item_id=f"msg_{run_id[9:]}", role="assistant", content="", status="in_progress", model=model
        )
        changes: dict[str, Any] = {}
        if self._system is not None and self._branch.conversation.system_prompt is None:
            changes["system_prompt"] = self._system
        if model != self._branch.conversation.model:
            changes["model"] = model[:50]
        if changes:
            await store.change(self._caller, key, **changes)
        stored = await store.append(self._caller, key, [*rows, answer], after)
        self._row = stored[-1]
        return {"id": key, "message_id": self._row.item_id, "messages": [row.item_id for row in stored[:-1]]}

    def stored_answer(self) -> StoredAnswer:
        """Return the answer in its stored form. Call `begin` first."""
        assert self._row is not None
        return StoredAnswer(self.store, self._caller, self.conversation_id, self._row, self._price, self._continued)


class AnswerReference(BaseModel):
    """The place of an answer in a conversation, for the gateway that continues the answer.

    Attributes:
        conversation_id: The public id of the conversation.
        item_id: The id of the message.
        content: The text of the message before this answer continued the message.
        token_count: The tokens of this text; None if unknown.
        cost_micros: The price of this text in micro-dollars; None without a price.
    """

    conversation_id: str
    item_id: str
    content: str = ""
    token_count: int = 0
    cost_micros: int = 0


class StoredAnswer:
    """A message in a conversation whose content is written while the answer is generated."""

    def __init__(
        self,
        store: ConversationStore,
        caller: Caller,
        conversation_id: str,
        row: StoredMessage,
        price: Price,
        before: StoredMessage | None = None,
    ) -> None:
        """Create the message of an answer.

        Args:
            store: The store of conversations.
            caller: The owner of the conversation.
            conversation_id: The public id of the conversation.
            row: The message.
            price: Returns the price of a model's usage in micro-dollars; None for a model without a
                price.
            before: The message before this answer continued it; None for a new message.
        """
        self._store, self._caller, self._row, self._price = store, caller, row, price
        self._begun = perf_counter()
        self.reference = AnswerReference(conversation_id=conversation_id, item_id=row.item_id)
        if before is not None:
            self.reference.content, self.reference.token_count = before.content, before.token_count or 0
            self.reference.cost_micros = before.cost_micros or 0

    @classmethod
    async def find(
        cls, store: ConversationStore, caller: Caller, reference: AnswerReference, price: Price
    ) -> StoredAnswer | None:
        """Return the message that another gateway began to fill, or None if it was deleted."""
        try:
            row = await store.message(caller, reference.conversation_id, reference.item_id)
        except NotFoundError:
            return None
        found = cls(store, caller, reference.conversation_id, row, price)
        found.reference = reference
        return found

    @property
    def is_over(self) -> bool:
        """Return True if the answer had ended when it was found, and its gateway was not lost."""
        return self._row.status != "in_progress" and self._row.finish_reason != GATEWAY_LOST

    async def save(self, run: ChatRun) -> bool:
        """Store the current state of the answer.

        Return False if the conversation was deleted in the meantime.
        """
        row, before, state = self._row, self.reference, run.state()
        cost = self._price(row.model or "", state.usage)
        self._row = replace(
            row,
            content=before.content + state.content,
            items=json.dumps(state.items) if state.items else None,
            status=state.status,
            finish_reason=state.finish,
            token_count=before.token_count + state.usage.completion_tokens,
            prompt_tokens=state.usage.prompt_tokens,
            cost_micros=None if cost is None else cost + before.cost_micros,
            latency_ms=round((perf_counter() - self._begun) * 1000),
        )
        return await self._store.save(self._caller, before.conversation_id, self._row)


class ResponseTurn:
    """A response of the Responses API that belongs to a conversation.

    A response in the background keeps its turn until it ends, so a turn has no messages.
    """

    def __init__(self, store: ConversationStore, caller: Caller, conversation_id: str) -> None:
        self._store, self._caller, self._conversation_id = store, caller, conversation_id

    async def items(self, hold: Callable[[int], None]) -> list[dict[str, Any]]:
        """Return the items of the conversation's current branch, as `ConversationStore.read` does."""
        branch = await self._store.read(self._caller, self._conversation_id, hold=hold)
        return [item for message in _finished_messages(branch.messages) for item in message_items(message)]

    async def check_room(self, items: Sequence[dict[str, Any]]) -> None:
        """Check that the caller may store a response to `items`.

        Raises:
            RateLimitError: The caller has the maximum size of conversations.
        """
        await self._store.check_room(self._caller, len(searchable_text(items)))

    async def add(self, entry: StoredResponse) -> None:
        """Add the input and the output of an ended response to the conversation."""
        response = entry.response
        rows = [message_from_item(item) for item in entry.items if item.get("type") != "item_reference"]
        if response["output"]:
            usage = response["usage"] or {}
            answer = NewMessage(
                item_id=response["output"][-1]["id"],
                role="assistant",
                content=searchable_text(response["output"]),
                items=json.dumps(response["output"]),
                status="completed" if response["status"] == "completed" else "incomplete",
                token_count=usage.get("output_tokens"),
                prompt_tokens=usage.get("input_tokens"),
                model=response["model"],
            )
            rows.append(answer)
        await self._store.append(self._caller, self._conversation_id, rows, answered=True)


def answer_run_id(message: StoredMessage) -> str | None:
    """Return the id of the answer that fills a message, or None if no chat answer fills it."""
    found = _ANSWER_ITEM_ID.fullmatch(message.item_id)
    return f"chatcmpl-{found[1]}" if found else None


def _finished_messages(messages: Sequence[StoredMessage]) -> list[StoredMessage]:
    """Return the messages without unfinished turns, which other browser tabs still wait for."""
    running = {message.parent_id for message in messages if message.status == "in_progress"}
    return [one for one in messages if one.status != "in_progress" and one.id not in running]


def _to_rows(message: dict[str, Any]) -> list[NewMessage]:
    """Return the stored messages that represent a chat message."""
    item_id, role = f"msg_{secrets.token_hex(12)}", message["role"]
    if role == "tool":
        output = {"call_id": message.get("tool_call_id"), "output": _text(message)}
        return [message_from_item({"type": "function_call_output", "id": f"fco{item_id[3:]}", **output})]
    rows = []
    if _text(message) or not message.get("tool_calls"):
        rows.append(NewMessage(item_id=item_id, role=role, content=_text(message)))
    for at, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        item = {"type": "function_call", "id": f"fc{item_id[3:]}_{at}", "call_id": call.get("id"), **function}
        rows.append(message_from_item(item))
    return rows


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""
