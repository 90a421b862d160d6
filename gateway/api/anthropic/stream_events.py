"""Conversion of answers to Anthropic's format.

An answer is a list of content blocks. A stream sends the blocks one after the other, as events.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable
from json.encoder import encode_basestring
from typing import Any

from pydantic_core import from_json

from llmops.gateway.errors import ApiError
from llmops.gateway.generation.answer import Answer, ChoiceDelta
from llmops.gateway.generation.answer_events import AnswerEvents
from llmops.gateway.generation.choice import Choice
from llmops.gateway.generation.parsers.output_processor import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallDelta,
    merge_adjacent,
)
from llmops.gateway.http.sse import encode_event

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
#: A function that returns the stop fields of a choice. The second argument is True if the message
#: has a tool call.
StopFields = Callable[[Choice, bool], dict[str, Any]]
_DELTAS: dict[type[OutputDelta], str] = {
    ContentDelta: '"text_delta","text":',
    ReasoningDelta: '"thinking_delta","thinking":',
    ToolCallDelta: '"input_json_delta","partial_json":',
}
PING = encode_event(b'{"type":"ping"}', "ping")
_MESSAGE_STOP = encode_event(b'{"type":"message_stop"}', "message_stop")


class MessageEvents(AnswerEvents):
    """The event stream of a message."""

    def __init__(
        self, answer: Answer, head: dict[str, Any], stop: StopFields, error_event: Callable[[ApiError], bytes]
    ) -> None:
        """Create the event stream.

        Args:
            answer: The answer to stream.
            head: The fields of the message that are known before its content.
            stop: Returns the fields that tell why a choice ended.
            error_event: Encodes an error that occurs in the middle of the stream.
        """
        super().__init__(answer)
        self._head, self._stop, self._error_event = head, stop, error_event
        self._started = self._called = False
        self._index = -1
        self._open: OutputDelta | None = None  # The first piece of the open content block.
        self._head_of_deltas = ""
        self._thinking: list[str] = []

    def render(self, delta: ChoiceDelta) -> bytes:
        """Return the events for one piece of output, encoded."""
        choice, text, _ = delta
        if choice.plain and text and isinstance(self._open, ContentDelta):
            return self._delta(text)
        parts = [] if self._started else [self._start()]
        for piece in choice.sort(text):
            parts.append(self._piece(piece))
        return b"".join(parts)

    def end(self) -> bytes:
        """Return the events that end the message, encoded."""
        parts = [] if self._started else [self._start()]
        stop = self._stop(self._answer.choices[0], self._called)
        last = _event("message_delta", delta=stop, usage=message_usage(self._answer))
        return b"".join([*parts, self._close_block(), last, _MESSAGE_STOP])

    def failed(self, error: ApiError) -> bytes:
        """Return the encoded event for an error."""
        return self._error_event(error)

    def _start(self) -> bytes:
        self._started = True
        usage = {**message_usage(self._answer), "output_tokens": 0}
        del usage["output_tokens_details"]
        return _event("message_start", message={**self._head, "usage": usage})

    def _piece(self, piece: OutputDelta) -> bytes:
        opening = b"" if self._continues(piece) else self._close_block() + self._open_block(piece)
        if isinstance(piece, ReasoningDelta):
            self._thinking.append(piece.text)
        return opening + self._delta(piece.text)

    def _continues(self, piece: OutputDelta) -> bool:
        block = self._open
        if isinstance(piece, ToolCallDelta):
            return isinstance(block, ToolCallDelta) and piece.index == block.index
        return type(piece) is type(block)

    def _open_block(self, piece: OutputDelta) -> bytes:
        self._open = piece
        self._index += 1
        self._called = self._called or isinstance(piece, ToolCallDelta)
        self._head_of_deltas = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._index},'
            f'"delta":{{"type":{_DELTAS[type(piece)]}'
        )
        start = _event("content_block_start", index=self._index, content_block=content_block_opening(piece))
        return start if self._index else start + PING

    def _delta(self, text: str) -> bytes:
        return f"{self._head_of_deltas}{encode_basestring(text)}}}}}\n\n".encode("utf-8", "replace") if text else b""

    def _close_block(self) -> bytes:
        if self._open is None:
            return b""
        signature_event = b""
        if isinstance(self._open, ReasoningDelta):
            signature = thinking_signature("".join(self._thinking))
            self._thinking.clear()
            delta = {"type": "signature_delta", "signature": signature}
            signature_event = _event("content_block_delta", index=self._index, delta=delta)
        self._open = None
        return signature_event + _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return encode_event(data.encode("utf-8", "replace"), kind)


def content_blocks(pieces: Iterable[OutputDelta]) -> list[dict[str, Any]]:
    """Return the content blocks that the pieces of a stream add up to."""
    return [_filled(piece) for piece in merge_adjacent(pieces)]


def content_block_opening(piece: OutputDelta) -> dict[str, Any]:
    """Return the empty content block to which `piece` is the first addition."""
    if isinstance(piece, ContentDelta):
        return {"type": "text", "text": ""}
    if isinstance(piece, ReasoningDelta):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}


def _filled(piece: OutputDelta) -> dict[str, Any]:
    block = content_block_opening(piece)
    if isinstance(piece, ToolCallDelta):
        return {**block, "input": tool_input(piece.arguments)}
    if isinstance(piece, ContentDelta):
        return {**block, "text": piece.text}
    return {**block, "thinking": piece.text, "signature": thinking_signature(piece.text)}


def tool_input(arguments: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object, which is partial if the answer was cut off.

    Text that is not a JSON object is wrapped as `{"INVALID_JSON": text}`, as Anthropic recommends.
    """
    try:
        value = from_json(arguments or "{}", allow_partial=True)
        # 1e999 is parsed as infinity, which JSON cannot represent.
        json.dumps(value, allow_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def thinking_signature(thinking: str) -> str:
    """Return a signature for thinking.

    The signature proves nothing and is never checked. Messages have a signature because clients
    drop thinking without a signature.
    """
    return base64.b64encode(hashlib.sha256(thinking.encode("utf-8", "replace")).digest()).decode()


def stop_fields(choice: Choice, *, called: bool, cut: bool) -> dict[str, Any]:
    """Return the fields that tell why a message ended.

    Args:
        choice: The finished choice.
        called: True if the message has a tool call.
        cut: True if the model's context had less room than `max_tokens`.
    """
    sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    reason = "stop_sequence" if sequence is not None else _STOP_REASONS[choice.finish_reason]
    if reason == "end_turn" and called:
        reason = "tool_use"  # A forced tool call ends with the finish reason `stop`.
    if reason == "max_tokens" and cut:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def message_usage(answer: Answer) -> dict[str, Any]:
    """Return the answer's token counts so far, in Anthropic's format.

    Cached tokens are counted in `cache_read_input_tokens` and not in `input_tokens`.
    """
    usage = answer.usage
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
