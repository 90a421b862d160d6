"""Hostile input of chat templates.

It is control tokens in whole and in parts, deep and wide variables, and odd histories.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.faults.fuzz.base import Case, Target

_CONTROLS = (
    "<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "</s>", "<s>", "[INST]", "<|eot_id|>", "<｜User｜>",
    "<|start|>", "<|end|>", "<|channel|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<start_of_turn>",
)  # fmt: skip
_PARTS = (
    "<|", "|>", "<|im_", "im_end", "end|>", "<", ">", "\n", " ", "\t", "x", "\x00", "\ue000", "\uf8ff", "\ufdd0", "▁",
    "{{ messages }}", "{% for a in b %}", "{#", "%0600000000d", "{0:600000000}", "\u2028", "\u200b", "é", "🙂",
)  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NAMES = (
    "bos_token", "eos_token", "messages", "tools", "add_generation_prompt", "enable_thinking", "thinking", "documents",
    "strftime_now", "raise_exception", "range", "namespace", "loop", "custom_tools", "date_string", "a b", "",
)  # fmt: skip
_PATHS = ("/v1/chat/completions", "/v1/chat/completions", "/v1/chat/completions", "/tokenize")
# bytes of a body that is answered: longer ones are only rendered and tokenised, or the engine's prefill of thousands
# of tokens would be all that is waited for
_ANSWERED = 2048


def cases(target: Target, chance: random.Random) -> Iterator[Case]:
    """Conversations in which every text is hostile."""
    while True:
        body: dict[str, Any] = {"model": target.model, "messages": _conversation(chance)}
        if chance.random() < 0.5:
            body["chat_template_kwargs"] = {chance.choice(_NAMES): _value(chance) for _ in range(chance.randrange(4))}
        if chance.random() < 0.3:
            body["tools"] = [_tool(chance) for _ in range(chance.choice((1, 3, 20)))]
        path = chance.choice(_PATHS) if len(json.dumps(body)) <= _ANSWERED else "/tokenize"
        if path != "/tokenize":
            body |= {"max_tokens": 2, **_options(chance)}
        yield Case(path, json.dumps(body).encode())


def _options(chance: random.Random) -> dict[str, Any]:
    options: tuple[dict[str, Any], ...] = (
        {},
        {"stream": True},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"chat_template": "{{ '%0600000000d' % 1 }}"},
        {"documents": [{"title": _text(chance), "text": _text(chance)}]},
    )
    return chance.choice(options)


def _conversation(chance: random.Random) -> list[dict[str, Any]]:
    return [_message(chance) for _ in range(chance.choice((1, 1, 2, 3, 8, 60)))]


def _message(chance: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": chance.choice(_ROLES), "content": _text(chance)}
    if message["role"] == "tool":
        message["tool_call_id"] = _text(chance)
    if message["role"] == "assistant" and chance.random() < 0.5:
        arguments = chance.choice((_text(chance), json.dumps({_text(chance): _value(chance)})))
        message["tool_calls"] = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    for name in ("name", "reasoning_content"):
        if chance.random() < 0.2:
            message[name] = _text(chance)
    return message


def _text(chance: random.Random) -> str:
    parts = [chance.choice(chance.choice((_CONTROLS, _PARTS))) for _ in range(chance.choice((0, 1, 2, 5, 20)))]
    return "".join(parts) * chance.choice((1, 1, 1, 1, 200))


def _value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth > chance.choice((2, 2, 40)) or kind < 0.4:
        return _text(chance)
    if kind < 0.6:
        return chance.choice((None, True, 0, -1, 2**63, 1e308, 0.1))
    if kind < 0.8:
        return [_value(chance, depth + 1)] * chance.choice((0, 1, 3))
    return {_text(chance): _value(chance, depth + 1)}


def _tool(chance: random.Random) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {_text(chance): {"description": _text(chance)}}}
    return {"type": "function", "function": {"name": "f", "description": _text(chance), "parameters": parameters}}
