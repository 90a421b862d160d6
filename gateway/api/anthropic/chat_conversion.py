"""Conversion of a messages request to the equivalent chat completions request."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from llmops.gateway.api.anthropic.schemas import (
    ContentBlock,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    ResultBlock,
    ThinkingChoice,
    ToolDefinition,
    ToolUseChoice,
)
from llmops.gateway.errors import ApiError, ContextLengthError, InvalidRequestError, UnsupportedError, missing_parameter
from llmops.gateway.generation.parsers.reasoning import reasoning_effort_arguments

# Names of fields whose names differ between chat completions (keys) and the Messages API (values).
# Errors are translated with these names.
_FIELD_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "continue_final_message": "messages",
    "user": "metadata.user_id",
}
_TOOL_FIELDS = ((".function.parameters", ".input_schema"), (".function.", "."))
#: Fields that are accepted without effect, so that clients which always send them work.
MESSAGE_IGNORED_FIELDS = frozenset(
    {
        *("container", "context_management", "diagnostics", "inference_geo", "speed", "thinking.display"),
    }
)
# Largest thinking budgets, in tokens, that select the efforts low and medium. Larger budgets select
# high.
_MAX_LOW_BUDGET, _MAX_MEDIUM_BUDGET = 4096, 16384
# The role of messages that may contain a block of a type. Text blocks may be in any message.
_BLOCK_ROLES = {
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_result": "user",
}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

ChatMessageDict = dict[str, Any]


def to_chat_request(request: CountTokensRequest, template: str) -> dict[str, Any]:
    """Return the body of the chat completions request that is equivalent to `request`.

    Args:
        request: The messages request.
        template: The source of the model's chat template, which determines whether the model can
            think.

    Raises:
        InvalidRequestError: The request is malformed.
        UnsupportedError: The request uses a feature that this gateway does not have.
    """
    _reject_unsupported(request)
    messages, continued = to_chat_messages(request.messages, request.system)
    choice, config = request.tool_choice, request.output_config
    effort = requested_effort(request)
    chat: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "continue_final_message": continued or None,
        "tools": _functions(request.tools or []) or None,
        "tool_choice": _tool_choice(choice, request.tools) if choice else None,
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "reasoning_effort": effort if effort and can_think(effort, template) else None,
        "response_format": _format(config.format.schema_) if config and config.format else None,
        **(_sampling(request) if isinstance(request, MessagesRequest) else {}),
    }
    # Unknown fields may be fields of chat completions, such as `seed`, and are passed on.
    return {**(request.model_extra or {}), **{key: value for key, value in chat.items() if value is not None}}


def requested_effort(request: CountTokensRequest) -> str | None:
    """Return the requested `reasoning_effort`. None leaves the effort to the model."""
    thinking, config = request.thinking, request.output_config
    if thinking is not None and thinking.type == "disabled":
        return "none"
    if config is not None and config.effort is not None:
        return config.effort if config.effort in ("low", "medium") else "high"
    return _effort_for(thinking) if thinking is not None else None


def ignored_message_fields(request: CountTokensRequest, template: str) -> frozenset[str]:
    """Return the names of the fields of `request` that have no effect on this model."""
    effort = requested_effort(request)
    cannot_think = effort is not None and not can_think(effort, template)
    return MESSAGE_IGNORED_FIELDS | {"thinking", "output_config.effort"} if cannot_think else MESSAGE_IGNORED_FIELDS


def can_think(effort: str, template: str) -> bool:
    """Return True if the model's chat template can be set to `effort`."""
    return reasoning_effort_arguments(effort, template) is not None


def translate_error_fields(error: ApiError, sent: Collection[str] = ()) -> None:
    """Replace the names of chat completions' fields in an error with names of the Messages API.

    The fields `sent` keep their names, because the client has sent them by these.
    """
    if isinstance(error, ContextLengthError):
        # Claude Code compacts the conversation when it reads these words and numbers.
        counts = f"{error.tokens} tokens > {error.most} maximum"
        error.message = f"prompt is too long: {error.message if error.tokens is None else counts}"
    head = (error.param or "").split(".")[0].split("[")[0]
    if head in sent:
        return
    if head in _FIELD_NAMES and error.message.startswith(f"{head}:"):
        error.message = _FIELD_NAMES[head] + error.message[len(head) :]
    renamed = (
        [(f"'{head}", f"'{_FIELD_NAMES[head]}")]
        if head in _FIELD_NAMES
        else list(_TOOL_FIELDS)
        if head == "tools"
        else []
    )
    for chat_name, own_name in renamed:
        error.message = error.message.replace(chat_name, own_name)
        error.param = f"'{error.param}".replace(chat_name, own_name)[1:]


def _reject_unsupported(request: CountTokensRequest) -> None:
    if request.thread is not None:
        # The SDK sends whole conversations after it receives this code.
        raise UnsupportedError(
            "thread is not supported, because this gateway keeps no messages; send the whole conversation.",
            param="thread",
            code="thread_unsupported_request",
        )
    if request.compaction is not None:
        raise UnsupportedError("compaction is not supported; leave it out.", param="compaction")
    if request.mcp_servers:
        raise UnsupportedError(
            "mcp_servers are not supported, as this gateway runs no tools; leave them out.", param="mcp_servers"
        )


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    return {
        "max_completion_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
        "user": request.metadata.user_id if request.metadata else None,
        "stream": request.stream,
    }


def _effort_for(thinking: ThinkingChoice) -> str:
    budget = thinking.budget_tokens
    if budget is None:
        return "medium"
    return "low" if budget <= _MAX_LOW_BUDGET else "medium" if budget <= _MAX_MEDIUM_BUDGET else "high"


def dropped_tool_types(request: CountTokensRequest) -> list[str]:
    """Return the types of the tools that are not offered to the model.

    Tools of these types run at Anthropic, so the request does not describe them.
    """
    return [tool.type for tool in request.tools or [] if tool.type not in (None, "custom")]


def _functions(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools) if tool.type in (None, "custom")]


def _tool(tool: ToolDefinition, where: str) -> dict[str, Any]:
    for field in ("name", "input_schema"):
        if getattr(tool, field) is None:
            raise missing_parameter(f"{where}.{field}")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _tool_choice(choice: ToolUseChoice, tools: Sequence[ToolDefinition] | None) -> str | dict[str, Any]:
    if choice.type in ("any", "tool") and not tools:
        raise InvalidRequestError(
            f"tool_choice is '{choice.type}', but there are no tools; send tools, or leave tool_choice out.",
            param="tool_choice",
        )
    if choice.type != "tool":
        return _TOOL_CHOICES[choice.type]
    if choice.name is None:
        raise missing_parameter("tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def to_chat_messages(
    messages: Sequence[MessageParam], system: str | Sequence[ResultBlock] | None
) -> tuple[list[ChatMessageDict], bool]:
    """Convert Anthropic's messages to messages of chat completions.

    Returns:
        The chat messages, and True if the answer continues the last of them.

    Raises:
        InvalidRequestError: A block is not supported. `param` is its path, such as
            `messages[2].content[0].text`.
    """
    transcript = _Transcript()
    if system:
        transcript.say("system", _texts(system, "system"))
    for index, message in enumerate(messages):
        transcript.add(message, f"messages[{index}].content")
    for said in transcript.messages:
        if "reasoning_content" in said:
            # joined once: text that grows by thousands of blocks would be copied for each
            said["reasoning_content"] = "".join(said["reasoning_content"])
    return transcript.messages, transcript.is_continued(messages[-1])


class _Transcript:
    """A builder of the chat messages of a request.

    Attributes:
        messages: The chat messages converted so far.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessageDict] = []

    def say(self, role: str, texts: Sequence[str]) -> ChatMessageDict:
        """Add texts to the last message if its role is `role`, and to a new message otherwise.

        Returns:
            The message that has the texts.
        """
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        last = self.messages[-1]
        last["content"] += [{"type": "text", "text": text} for text in texts]
        return last

    def add(self, message: MessageParam, where: str) -> None:
        """Convert a message and add it.

        Args:
            message: The message.
            where: The path of the message's content in the request, for errors.
        """
        if isinstance(message.content, str):
            self.say(message.role, [message.content])
            return
        if not message.content:
            raise InvalidRequestError(f"'{where}' must not be empty.", param=where)
        for index, block in enumerate(message.content):
            self._add(message.role, block, f"{where}[{index}]")

    def is_continued(self, last: MessageParam) -> bool:
        """Return True if the answer continues the last message.

        An assistant message without text is removed from the end instead.
        """
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
        expected = _BLOCK_ROLES.get(block.type, role)
        if expected != role:
            raise InvalidRequestError(
                f"A block of type '{block.type}' belongs in a message of the {expected}; move it.",
                param=f"{where}.type",
            )
        if block.type == "tool_result":
            self.messages.append(_tool_message(block, where))
        elif block.type == "tool_use":
            self.say(role, []).setdefault("tool_calls", []).append(_tool_call(block, where))
        elif block.type == "thinking":
            self.say(role, []).setdefault("reasoning_content", []).append(_required(block, "thinking", where))
        elif block.type == "redacted_thinking":
            self.say(role, [])  # Only Anthropic can decrypt the block's content.
        else:
            self.say(role, [_text(block, where)])


def _tool_call(block: ContentBlock, where: str) -> ChatMessageDict:
    if block.input is None:
        raise missing_parameter(f"{where}.input")
    function = {"name": _required(block, "name", where), "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": _required(block, "id", where), "type": "function", "function": function}


def _tool_message(block: ContentBlock, where: str) -> ChatMessageDict:
    text = "\n".join(_texts(block.content or "", f"{where}.content"))
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _required(block, "tool_use_id", where), "content": text}


def _texts(content: str | Sequence[ResultBlock], where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{where}[{index}]") for index, block in enumerate(content)]


def _text(block: ContentBlock | ResultBlock, where: str) -> str:
    if block.type != "text":
        problem = (
            f"'{where}' is of type '{block.type}', which is not supported: models here take text only. Leave it out."
        )
        raise UnsupportedError(problem, param=f"{where}.type")
    if block.text is None:
        raise missing_parameter(f"{where}.text")
    return block.text


def _required(block: ContentBlock, field: str, where: str) -> str:
    value = getattr(block, field)
    if not isinstance(value, str):
        raise missing_parameter(f"{where}.{field}")
    return value


class SessionBlock(NamedTuple):
    """A system block that has no meaning for the model and differs in each session of an agent.

    The prefix cache matches prompts from their first token. With such a block at the beginning, the
    engine recomputes 20,000 tokens of instructions and tools in every session.

    Attributes:
        client: The client that sends the block, with the newest version in which it was seen.
        name: The name of the block in the response header `x-llmops-ignored`.
        pattern: Matches the whole text of the block.
    """

    client: str
    name: str
    pattern: re.Pattern[str]


#: The system blocks that are removed from prompts; all other blocks stay. The billing header
#: contains a hash of the session.
SESSION_BLOCKS = (
    SessionBlock(
        "Claude Code 2.1.330",
        "system.x-anthropic-billing-header",
        re.compile(r"x-anthropic-billing-header: [^\n]{1,400}\n?"),
    ),
)


def without_session_blocks(
    system: str | list[ResultBlock] | None,
) -> tuple[str | list[ResultBlock] | None, list[str]]:
    """Return the system prompt without a block of `SESSION_BLOCKS` at its beginning.

    Returns:
        The system prompt, and the name of the block that was removed, if any.
    """
    if not isinstance(system, list) or len(system) < 2:
        return system, []
    for block in SESSION_BLOCKS:
        if block.pattern.fullmatch(getattr(system[0], "text", None) or ""):
            return system[1:], [block.name]
    return system, []
