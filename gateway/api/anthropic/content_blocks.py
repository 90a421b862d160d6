"""An answer as content blocks: what it says, why it ended, what it cost."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.choice import Choice
from llmops.gateway.generation.parsers.output_processor import ContentDelta, OutputDelta, ReasoningDelta, ToolCallDelta
from llmops.gateway.generation.parsers.processor_chain import merge_adjacent

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def content_blocks(pieces: Iterable[OutputDelta]) -> list[dict[str, Any]]:
    """The content that streamed pieces add up to."""
    return [_filled(piece) for piece in merge_adjacent(pieces)]


def content_block_opening(piece: OutputDelta) -> dict[str, Any]:
    """The block that begins with `piece`, with nothing in it yet."""
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
    """A call's arguments as the object that they are, or begin to be where the answer was cut off.

    What a model wrote that is no JSON object comes in the form that Anthropic recommends for it.
    """
    try:
        value = from_json(arguments or "{}", allow_partial=True)
        json.dumps(value, allow_nan=False)  # 1e999 cannot be written as JSON
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def thinking_signature(thinking: str) -> str:
    """What clients send back with the thinking, and drop it without. It proves nothing, and is not checked."""
    return base64.b64encode(hashlib.sha256(thinking.encode("utf-8", "replace")).digest()).decode()


def stop_fields(choice: Choice, *, called: bool, cut: bool) -> dict[str, Any]:
    """Why it ended. `called`: there is a call in it; `cut`: the context had less room than was asked for."""
    sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    reason = "stop_sequence" if sequence is not None else _REASONS[choice.finish_reason]
    if reason == "end_turn" and called:
        reason = "tool_use"  # a call that was forced by its name
    if reason == "max_tokens" and cut:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def message_usage(answer: Answer) -> dict[str, Any]:
    """The counts so far. What the engine had in its cache is not among the `input_tokens`, but beside them."""
    used = answer.usage
    cached = used.cached_tokens or 0
    return {
        "input_tokens": used.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"thinking_tokens": used.reasoning_tokens},
    }
