"""The conversion of an answer's deltas to output items and to numbered, typed events."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llmops.gateway.conversations.items import Item
from llmops.gateway.generation.parsers.output_processor import ContentDelta, OutputDelta, ReasoningDelta, ToolCallDelta
from llmops.gateway.generation.sampling import first_not_none
from llmops.gateway.interfaces import FinishReason, Usage
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.responses_request import ResponsesRequest

Event = dict[str, Any]
#: Types of errors with status 429, which responses report as `rate_limit_exceeded`.
_LIMIT_ERROR_TYPES = frozenset({"requests", "tokens", "insufficient_quota"})


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


class ResponseBuilder:
    """A builder of one response. The methods return the events to send in a stream.

    Attributes:
        response: The response without the text of the item in progress; `so_far` includes the text.
        cuts: The sizes of the deltas of each item, in characters, from which `replay_events` makes
            the same events again.
    """

    def __init__(
        self, response: dict[str, Any], origins: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    ) -> None:
        """Create a builder that fills `response`.

        Args:
            response: The response without output.
            origins: The fields `name` and `namespace` of functions in namespaces, by the name that
                the model uses.
        """
        self.response = response
        self._origins = origins
        self.cuts: list[list[int]] = []
        self._sequence = 0
        self._item: Item | None = None
        self._parts: list[str] = []
        self._call = -1

    @property
    def id(self) -> str:
        return str(self.response["id"])

    def so_far(self) -> dict[str, Any]:
        """Return a copy of the response that includes the text of the item in progress."""
        now = _snapshot(self.response)
        if self._item is not None:
            _fill(now["output"][-1], "".join(self._parts))
        return now

    def restart(self) -> None:
        """Discard all items. Must be called before a client has seen an item."""
        self.response["output"], self.cuts = [], []
        self._item, self._parts, self._call = None, [], -1

    def start(self) -> list[Event]:
        return [self._event("response.created"), self._event("response.in_progress")]

    def add(self, piece: OutputDelta) -> list[Event]:
        """Add the next delta of the answer, and return its events.

        An item ends where the next item begins.
        """
        events = self._switch(piece)
        return [*events, self._delta(piece.text)] if piece.text else events

    def repeat(self, item: Item, cuts: Sequence[int], closed: bool) -> Iterator[Event]:
        """Yield the events of an item that is already complete or in the store.

        Args:
            item: The item.
            cuts: The sizes of the item's deltas, in characters.
            closed: True if the events include the end of the item.
        """
        yield from self._open({**item, **_EMPTY_ITEMS[item["type"]], "status": "in_progress"})
        text, at = _text_of(item), 0
        for size in cuts:
            yield self._delta(text[at : at + size])
            at += size
        if closed:
            yield from self._close(item["status"])

    def last(self, response: dict[str, Any]) -> Event:
        """Return the event that ends a stream, for the ended `response`."""
        self.response = response
        return self._event(f"response.{response['status']}")

    def finish(self, reason: FinishReason, usage: Usage, ended_at: int | None = None) -> list[Event]:
        """Finish the response and return its last events.

        The response is completed, or incomplete if the token limit or a filter cut it off.
        `ended_at` is the Unix time of the end; None for now.
        """
        cut = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(reason)
        events = self._close("incomplete" if cut else "completed")
        self.response["usage"] = _usage(usage)
        self.response["incomplete_details"] = {"reason": cut} if cut else None
        if not cut:
            self.response["completed_at"] = int(time.time()) if ended_at is None else ended_at
        return [*events, self._end("incomplete" if cut else "completed")]

    def fail(self, error: Mapping[str, Any]) -> list[Event]:
        """Mark the response as failed midway, and return its last events.

        `error` has the form in which OpenAI's APIs send errors (`ApiError.body`).
        """
        code = "rate_limit_exceeded" if error["type"] in _LIMIT_ERROR_TYPES else "server_error"
        events = self._close("incomplete")
        self.response["error"] = {"code": code, "message": error["message"]}
        return [*events, self._end("failed")]

    def cancel(self) -> None:
        """Mark the response as cancelled: the client disconnected, or a request cancelled it."""
        self._close("incomplete")
        self.response["status"] = "cancelled"

    # -- items

    def _switch(self, piece: OutputDelta) -> list[Event]:
        kind = _ITEM_TYPES[type(piece)]
        if (
            self._item
            and self._item["type"] == kind
            and (not isinstance(piece, ToolCallDelta) or piece.index == self._call)
        ):
            return []
        events = self._close("completed")
        item: Item = {"type": kind, "id": self._new_item_id(kind), **_EMPTY_ITEMS[kind], "status": "in_progress"}
        if isinstance(piece, ToolCallDelta):
            self._call = piece.index
            item.update(call_id=piece.id, name=piece.name)
            item.update(self._origins.get(piece.name or "", {}))
        return [*events, *self._open(item)]

    def _new_item_id(self, kind: str) -> str:
        """Return the id of the next item: the same at every gateway that makes these events."""
        source = f"{self.id}/{len(self.response['output'])}"
        return f"{_PREFIXES[kind]}_{hashlib.sha256(source.encode()).hexdigest()[:48]}"

    def _open(self, item: Item) -> list[Event]:
        self._item, self._parts = item, []
        self.cuts.append([])
        self.response["output"].append(item)
        events = [self._event("response.output_item.added", output_index=self._index, item=_snapshot(item))]
        if item["type"] != "function_call":
            events.append(self._part_event("response.content_part.added", ""))
        return events

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _delta(self, text: str) -> Event:
        assert self._item is not None
        self._parts.append(text)
        self.cuts[-1].append(len(text))
        kind = self._item["type"]
        place = {"item_id": self._item["id"], "output_index": self._index}
        if kind == "function_call":
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        if kind == "reasoning":
            return self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)
        return self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=[])

    def _close(self, status: str) -> list[Event]:
        item = self._item
        if item is None:
            return []
        text = "".join(self._parts)
        place = {"item_id": item["id"], "output_index": self._index}
        events: list[Event] = []
        _fill(item, text)
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": text}
            events.append(self._event("response.function_call_arguments.done", **place, **done))
        else:
            events += self._text_done(item["type"], place, text)
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=self._index, item=_snapshot(item)))
        self._item = None
        return events

    def _text_done(self, kind: str, place: dict[str, Any], text: str) -> list[Event]:
        if kind == "reasoning":
            done = self._event("response.reasoning_text.done", **place, content_index=0, text=text)
        else:
            done = self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=[])
        return [done, self._part_event("response.content_part.done", text)]

    def _part_event(self, kind: str, text: str) -> Event:
        assert self._item is not None
        part = _part(self._item["type"], text)
        return self._event(kind, item_id=self._item["id"], output_index=self._index, content_index=0, part=part)

    # -- events

    def _end(self, status: str) -> Event:
        self.response["status"] = status
        return self._event(f"response.{status}")

    def _event(self, kind: str, **fields: Any) -> Event:
        fields = fields or {"response": _snapshot(self.response)}
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


_ITEM_TYPES = {ContentDelta: "message", ReasoningDelta: "reasoning", ToolCallDelta: "function_call"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_EMPTY_ITEMS: dict[str, dict[str, Any]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {"arguments": ""},
}


def replay_events(response: dict[str, Any], cuts: Sequence[Sequence[int]]) -> Iterator[Event]:
    """Yield all events of a response so far, equal to the events that were sent before.

    Each event is made when it is asked for, because all together take hundreds of bytes per token.
    `cuts` has the sizes of each output item's deltas, in characters.
    """
    fresh = {key: value for key, value in response.items() if key != "completed_at"}
    fresh.update(status="in_progress", output=[], usage=None, error=None, incomplete_details=None)
    builder = ResponseBuilder(fresh)
    yield from builder.start()
    over = response["status"] in ("completed", "incomplete", "failed")
    for at, (item, sizes) in enumerate(zip(response["output"], cuts, strict=True), start=1):
        # A response that was cancelled or still runs has not sent the end of its last item.
        yield from builder.repeat(item, sizes, closed=over or at < len(cuts))
    if over:
        yield builder.last(response)


def _text_of(item: Item) -> str:
    return str(item["arguments"]) if item["type"] == "function_call" else "".join(p["text"] for p in item["content"])


def _fill(item: Item, text: str) -> None:
    if item["type"] == "function_call":
        item["arguments"] = text
    else:
        item["content"] = [_part(item["type"], text)]


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _snapshot(value: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an item or a response that later deltas do not change."""
    return {**value, **({"output": [dict(item) for item in value["output"]]} if "output" in value else {})}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def new_response(request: ResponsesRequest, model: GenerativeModel, service_tier: str = "default") -> dict[str, Any]:
    """Return a new response without output."""
    own = model.card.sampling
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": model.name,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "prompt_cache_key": request.prompt_cache_key,
        "safety_identifier": request.safety_identifier,
        "service_tier": service_tier,
        "store": request.store is not False,
        "temperature": first_not_none(request.temperature, own.temperature, 1.0),
        "text": {"format": _format(request)},
        "tool_choice": request.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in request.tools or []],
        "top_p": first_not_none(request.top_p, own.top_p, 1.0),
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def _format(request: ResponsesRequest) -> dict[str, Any]:
    given = request.text.format if request.text else None
    return given.model_dump(by_alias=True, exclude_none=True) if given else {"type": "text"}
