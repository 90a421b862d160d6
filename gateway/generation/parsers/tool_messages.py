"""Messages with tool calls and results, in the form that chat templates accept.

Templates expect a call's arguments as an object, while OpenAI's API has them as text. Mistral's
templates require ids of nine characters. For a template that does not render tools, the tools,
calls and results become text in Hermes' form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

_INTRODUCTION = (
    "You can call these functions. Their signatures stand between <tools> and </tools>, one JSON object per line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call a function, answer with a JSON object with its name and arguments between <tool_call> and </tool_call>:\n"
    '<tool_call>\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n</tool_call>\n'
    "Results come back between <tool_response> and </tool_response>."
)

TemplateMessage = dict[str, Any]

#: Roles of messages that hold the result of a call.
CALL_ROLES = ("tool", "function")


def messages_for_template(
    messages: Sequence[Mapping[str, Any]], *, mistral_ids: bool = False, as_text: bool = False
) -> list[TemplateMessage]:
    """Return copies of the messages in which arguments of calls are objects.

    Args:
        messages: The messages.
        mistral_ids: True to replace ids by ids of nine characters.
        as_text: True to write arguments as JSON text instead. Text that is not a JSON object always
            stays text.
    """
    return [_message_for_template(message, mistral_ids, as_text) for message in messages]


def _message_for_template(message: Mapping[str, Any], mistral_ids: bool, as_text: bool) -> TemplateMessage:
    copy = dict(message)
    if mistral_ids and copy.get("tool_call_id"):
        copy["tool_call_id"] = to_mistral_call_id(copy["tool_call_id"])
    if copy.get("tool_calls"):
        copy["tool_calls"] = [_call_for_template(call, mistral_ids, as_text) for call in copy["tool_calls"]]
    else:
        # Templates check whether the key exists, so absent values must not be present as None.
        copy.pop("tool_calls", None)
    return copy


def _call_for_template(call: Mapping[str, Any], mistral_ids: bool, as_text: bool) -> TemplateMessage:
    arguments = call["function"].get("arguments")
    function = {**call["function"], "arguments": arguments or "{}" if as_text else _as_object(arguments)}
    copy = {**call, "type": "function", "function": function}
    if mistral_ids:
        copy["id"] = to_mistral_call_id(str(call.get("id") or function["name"]))
    return copy


def _as_object(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def to_mistral_call_id(call_id: str) -> str:
    """Return `call_id` if Mistral's templates accept it, else a replacement.

    The replacement has nine characters and is always the same for the same id.
    """
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def tools_in_system_message(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[TemplateMessage]:
    """Return the messages with the tools in the system message, and calls and results as text."""
    plain = _calls_as_text(messages)
    if not tools:
        return plain
    introduction = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] in ("system", "developer"):
        first = {**plain[0], "content": f"{_text(plain[0])}\n\n{introduction}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[TemplateMessage]:
    """Return the messages with calls and results as text.

    Consecutive results become one message, because many templates require alternating turns.
    """
    plain: list[TemplateMessage] = []
    for are_results, group in groupby(messages, lambda message: message["role"] in CALL_ROLES):
        if are_results:
            plain.append({"role": "user", "content": "\n".join(map(_result, group))})
        else:
            plain += map(_with_calls_in_text, group)
    return plain


def _result(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{_text(message)}\n</tool_response>"


def _with_calls_in_text(message: Mapping[str, Any]) -> TemplateMessage:
    copy = dict(message)
    calls = copy.pop("tool_calls", None)
    if calls:
        written = [f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls]
        copy["content"] = "\n".join([*filter(None, [_text(copy)]), *written])
    return copy


def _call_text(function: Mapping[str, Any]) -> str:
    return json.dumps(
        {"name": function["name"], "arguments": _as_object(function.get("arguments"))}, ensure_ascii=False
    )


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return content or ""
