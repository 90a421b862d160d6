"""Mutations of valid request bodies, for every endpoint."""

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.faults.fuzz.base import Case, Target

_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/n"}}, "$defs": {"n": {}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "call_1", "content": "x"},
    {"role": "user", "content": "Hello"},
]
_SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x", "y"], "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [3],
    "n": 1, "user": "u", "skip_special_tokens": True, "stream_options": None, "logit_bias": None,
}  # fmt: skip
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": _SCHEMA}}
_RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": _SCHEMA}
_ITEMS = [
    {"role": "user", "content": "hi"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "t"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t"}]},
]
_CACHED = {"cache_control": {"type": "ephemeral"}}
_MESSAGES_TOOL = {"name": "f", "description": "d", "input_schema": _SCHEMA, "strict": True, **_CACHED}
_TEXT = {"type": "text", "text": "t"}
_THOUGHTS = [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking", "data": "d"}]
_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [_TEXT], "is_error": True}
_TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", **_CACHED}]},
    {"role": "assistant", "content": [*_THOUGHTS, _TEXT, _USE]},
    {"role": "user", "content": [_RESULT, _TEXT]},
]
_MESSAGES_REQUEST = {"messages": _TURNS, "system": [{"type": "text", "text": "s", **_CACHED}], "max_tokens": 4}
_MESSAGES_SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x", "y"], "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, "service_tier": "auto",
}  # fmt: skip
_FORMATTED = {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}}
_BEGUN = [*_TURNS, {"role": "assistant", "content": "b"}]
_SHORT = {"messages": _MESSAGES[-1:], "max_tokens": 4}
SEEDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 4, **_SAMPLING}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_completion_tokens": 4, "stream": True, "tools": [_TOOL]}),
    ("/v1/chat/completions", {**_SHORT, "tools": [_TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", {**_SHORT, "response_format": _FORMAT, "logprobs": True}),
    ("/v1/chat/completions", {**_SHORT, "guided_choice": ["a", "b"], "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4, "stream": True, **_SAMPLING}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4, "guided_regex": "[ab]+", "logprobs": 0}),
    ("/v1/responses", {"input": _ITEMS, "max_output_tokens": 4, "tools": [_RESPONSES_TOOL], "store": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "stream": True, "text": {"format": {"type": "text"}}}),
    ("/v1/responses/input_tokens", {"input": _ITEMS, "tools": [_RESPONSES_TOOL]}),
    ("/v1/messages", {**_MESSAGES_REQUEST, **_MESSAGES_SAMPLING, "tools": [_MESSAGES_TOOL]}),
    ("/v1/messages", {**_MESSAGES_REQUEST, "stream": True, "messages": _BEGUN}),
    ("/v1/messages", {**_MESSAGES_REQUEST, "tools": [_MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "f"}}),
    ("/v1/messages", {**_MESSAGES_REQUEST, "output_config": _FORMATTED, "stream": True}),
    ("/v1/messages/count_tokens", {"messages": _TURNS, "tools": [_MESSAGES_TOOL], "tool_choice": {"type": "any"}}),
    ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 8, "encoding_format": "base64"}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
)
_ENCODED = ("/v1/embeddings", "/v1/rerank")
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 1e308, 0.5, "", "x", "\x00", "é🦙\u202e", "\ud800",
    "none", "required", "auto", "NaN", [], {}, [[]], [None], {"": ""}, ["x"] * 300, "y" * 20_000,
    [{"type": "function"}],
    {"$ref": "#"}, {"type": "object", "properties": {"x": {"$ref": "#/x"}}}, {"type": "json_object"}, [0, 2**40],
)  # fmt: skip


def cases(target: Target, chance: random.Random) -> Iterator[Case]:
    """Valid requests with a few places of their trees changed; now and then the text itself is broken."""
    while True:
        path, seed_body = chance.choice(SEEDS)
        body = {"model": target.embedding_model if path in _ENCODED else target.model, **_copy(seed_body)}
        for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
            with contextlib.suppress(RecursionError):
                _mutate(body, chance)
        yield Case(path, _damaged(json.dumps(body).encode(), chance))


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _mutate(body: dict[str, Any], chance: random.Random) -> None:
    """Change one place of the tree."""
    places = list(_places(body))
    if not places:
        return
    holder, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.5:
        holder[key] = _copy(chance.choice(_ODD))
    elif kind < 0.65:
        del holder[key]
    elif kind < 0.8:
        other, other_key = chance.choice(places)
        holder[key] = _copy(other[other_key]) if _still_there(other, other_key) else None
    elif kind < 0.9:
        for _ in range(chance.choice((1, 5, 60, 100))):
            inner = holder[key]
            holder[key] = [inner] if chance.random() < 0.5 else {"type": "object", "properties": {"p": inner}}
    elif isinstance(holder, dict):
        holder[chance.choice(("strict", "extra", "n", "stream", "type", "$ref", ""))] = _copy(chance.choice(_ODD))


def _still_there(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    stack = [value]
    while stack:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            yield node, key
            stack.append(node[key])


def _damaged(data: bytes, chance: random.Random) -> bytes:
    """Now and then the text itself is broken."""
    if chance.random() > 0.1 or not data:
        return data
    at = chance.randrange(len(data))
    flipped = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    inserted = data[:at] + chance.choice((b"NaN", b"[" * 50_000, b'{"a":' * 20_000, b"\\ud800")) + data[at:]
    return chance.choice((data[:at], flipped, data + data, inserted))
