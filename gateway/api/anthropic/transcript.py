"""Turns of blocks as the messages of chat completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llmops.gateway.api.anthropic.schemas import ContentBlock, MessageParam, ResultBlock
from llmops.gateway.errors import InvalidRequestError, UnsupportedError, missing_parameter

ChatMessageDict = dict[str, Any]
# of which role the blocks other than text are
_ROLES = {"tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant", "tool_result": "user"}


def to_chat_messages(
    turns: Sequence[MessageParam], system: str | Sequence[ResultBlock] | None
) -> tuple[list[ChatMessageDict], bool]:
    """Chat messages, and whether the answer goes on with the last of them.

    Raises InvalidRequestError, `param` as in `messages[2].content[0].text`, for what this gateway cannot take.
    """
    transcript = _Transcript()
    if system:
        transcript.say("system", _texts(system, "system"))
    for at, turn in enumerate(turns):
        transcript.add(turn, f"messages[{at}].content")
    return transcript.messages, transcript.is_begun(turns[-1])


class _Transcript:
    def __init__(self) -> None:
        self.messages: list[ChatMessageDict] = []

    def say(self, role: str, texts: Sequence[str]) -> ChatMessageDict:
        """Add to the last message where it is of `role`, else begin one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        last = self.messages[-1]
        last["content"] += [{"type": "text", "text": text} for text in texts]
        return last

    def add(self, turn: MessageParam, where: str) -> None:
        if isinstance(turn.content, str):
            self.say(turn.role, [turn.content])
            return
        if not turn.content:
            raise InvalidRequestError(f"'{where}' must not be empty.", param=where)
        for at, block in enumerate(turn.content):
            self._add(turn.role, block, f"{where}[{at}]")

    def is_begun(self, last: MessageParam) -> bool:
        """Whether the last turn is the beginning of the answer. One without any text is none, and is left out."""
        if last.role != "assistant":
            return False
        message = self.messages[-1]
        if message.get("tool_calls"):
            raise InvalidRequestError(
                "The last message uses tools: send their results (tool_result) in a message after it.",
                param="messages",
            )
        if any(part["text"].strip() for part in message["content"]):
            return True
        self.messages.pop()
        if not self.messages:
            raise InvalidRequestError("'messages' must contain a non-empty message.", param="messages")
        return False

    def _add(self, role: str, block: ContentBlock, where: str) -> None:
        wanted = _ROLES.get(block.type, role)
        if wanted != role:
            raise InvalidRequestError(
                f"A block of type '{block.type}' belongs in a message of the {wanted}.", param=f"{where}.type"
            )
        if block.type == "tool_result":
            self.messages.append(_result(block, where))
        elif block.type == "tool_use":
            self.say(role, []).setdefault("tool_calls", []).append(_call(block, where))
        elif block.type == "thinking":
            message = self.say(role, [])
            message["reasoning_content"] = message.get("reasoning_content", "") + _needed(block, "thinking", where)
        elif block.type == "redacted_thinking":
            self.say(role, [])  # nobody here can read it
        else:
            self.say(role, [_text(block, where)])


def _call(block: ContentBlock, where: str) -> ChatMessageDict:
    if block.input is None:
        raise missing_parameter(f"{where}.input")
    function = {"name": _needed(block, "name", where), "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": _needed(block, "id", where), "type": "function", "function": function}


def _result(block: ContentBlock, where: str) -> ChatMessageDict:
    text = "\n".join(_texts(block.content or "", f"{where}.content"))
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _needed(block, "tool_use_id", where), "content": text}


def _texts(content: str | Sequence[ResultBlock], where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{where}[{at}]") for at, block in enumerate(content)]


def _text(block: ContentBlock | ResultBlock, where: str) -> str:
    if block.type != "text":
        said = f"'{where}' is of type '{block.type}', which is not supported: models here take text only."
        raise UnsupportedError(said, param=f"{where}.type")
    if block.text is None:
        raise missing_parameter(f"{where}.text")
    return block.text


def _needed(block: ContentBlock, field: str, where: str) -> str:
    value = getattr(block, field)
    if not isinstance(value, str):
        raise missing_parameter(f"{where}.{field}")
    return value
