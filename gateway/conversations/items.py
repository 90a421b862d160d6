"""The conversion between items of the Responses API and messages of chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmops.gateway.conversations.response_tools import flat_name
from llmops.gateway.errors import InvalidRequestError

Item = dict[str, Any]
MessageDict = dict[str, Any]

# Fields of items and of their content parts that this gateway reads or shows. Other fields are not
# stored: they could be megabytes that no client reads, or millions of values.
_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
}
_PARTS = frozenset({"content", "output", "summary"})
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def parse_input_items(value: str | Sequence[Mapping[str, Any]]) -> list[Item]:
    """Return the field `input` as items. A text becomes one user message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    return [_known_fields(item) for item in value]


def _known_fields(item: Mapping[str, Any]) -> Item:
    known: Item = {name: item[name] for name in ("type", "id") if name in item}
    for name in ("status", *_FIELDS.get(_kind(item), ())):
        value = item.get(name)
        if name in _PARTS and isinstance(value, list):
            known[name] = [_known_part(part) for part in value]
        elif isinstance(value, str) or (name in _PARTS and name in item):
            known[name] = value
    return known


def _known_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {name: part[name] for name in ("type", "text", "refusal") if isinstance(part.get(name), str)}


def _kind(item: Mapping[str, Any]) -> str:
    return str(item.get("type") or ("message" if "role" in item else None))


def to_messages(items: Iterable[Mapping[str, Any]], instructions: str | None = None) -> list[MessageDict]:
    """Return chat messages for `items`.

    Calls and reasoning are merged into the assistant message that they belong to.

    Raises:
        InvalidRequestError: An item has a value that this gateway does not support. `param` names
            the field, as in `input[2].content`.
    """
    messages: list[MessageDict] = [{"role": "system", "content": instructions}] if instructions else []
    for at, item in enumerate(items):
        _add(messages, item, f"input[{at}]")
    return messages


def _add(messages: list[MessageDict], item: Mapping[str, Any], param: str) -> None:
    kind = _kind(item)
    if kind == "message":
        _add_message(messages, item, param)
    elif kind == "function_call":
        _assistant(messages).setdefault("tool_calls", []).append(_call(item, param))
    elif kind == "function_call_output":
        output = _text(item.get("output"), f"{param}.output")
        messages.append({"role": "tool", "tool_call_id": _require_text(item, "call_id", param), "content": output})
    elif kind == "reasoning":
        shown = [_text(item[name], f"{param}.{name}") for name in ("content", "summary") if item.get(name)]
        messages.append({"role": "assistant", "content": None, "reasoning_content": next(filter(None, shown), None)})
    else:
        raise InvalidRequestError(f"Items of type '{kind}' are not supported; leave them out.", param=f"{param}.type")


def _add_message(messages: list[MessageDict], item: Mapping[str, Any], param: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequestError(
            f"'{role}' is not a valid message role; use user, assistant, system or developer.", param=f"{param}.role"
        )
    text = _text(item.get("content"), f"{param}.content")
    last = messages[-1] if messages else None
    if role == "assistant" and last and last["role"] == "assistant" and last.get("content") is None:
        last["content"] = text  # Reasoning precedes its message.
    else:
        messages.append({"role": role, "content": text})


def _assistant(messages: list[MessageDict]) -> MessageDict:
    """Return the assistant message that a call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _call(item: Mapping[str, Any], param: str) -> MessageDict:
    name = flat_name(_require_text(item, "name", param), item.get("namespace"))
    function = {"name": name, "arguments": _require_text(item, "arguments", param)}
    return {"id": _require_text(item, "call_id", param), "type": "function", "function": function}


def _require_text(item: Mapping[str, Any], key: str, param: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidRequestError(f"'{param}.{key}' must be a string.", param=f"{param}.{key}")
    return value


def _text(content: object, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"'{param}' must be a string or a list of parts.", param=param)
    return "".join(_part_text(part, f"{param}[{at}]") for at, part in enumerate(content))


def _part_text(part: object, param: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in (*_TEXT_PARTS, "refusal"):
        raise InvalidRequestError(f"Content of type '{kind}' is not supported; send text only.", param=f"{param}.type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"'{param}.text' must be a string.", param=f"{param}.text")
    return text
