"""A messages request as the chat completions request that means the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmops.gateway.api.anthropic.schemas import (
    CountTokensRequest,
    MessagesRequest,
    ThinkingChoice,
    ToolDefinition,
    ToolUseChoice,
)
from llmops.gateway.api.anthropic.transcript import to_chat_messages
from llmops.gateway.errors import ApiError, ContextLengthError, InvalidRequestError, UnsupportedError, missing_parameter
from llmops.gateway.generation.parsers.reasoning import reasoning_effort_arguments

# What chat completions calls by another name, to name the right field in errors.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "continue_final_message": "messages",
    "user": "metadata.user_id",
}
_TOOL = ((".function.parameters", ".input_schema"), (".function.", "."))
MESSAGE_IGNORED_FIELDS = frozenset(
    {
        "cache_control",
        "container",
        "context_management",
        "diagnostics",
        "inference_geo",
        "service_tier",
        "speed",
        "thinking.display",
    }
)
# thinking budgets, in tokens, up to which an effort is the lower one
_LOW, _MEDIUM = 4096, 16384
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat_request(request: CountTokensRequest, template: str) -> dict[str, Any]:
    """The body of the chat completions request for `request`; `template` is the model's chat template."""
    _refuse_unsupported(request)
    messages, begun = to_chat_messages(request.messages, request.system)
    choice, config = request.tool_choice, request.output_config
    effort = requested_effort(request)
    own: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "continue_final_message": begun or None,
        "tools": _functions(request.tools or []) or None,
        "tool_choice": _tool_choice(choice, request.tools) if choice else None,
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "reasoning_effort": effort if effort and can_think(effort, template) else None,
        "response_format": _format(config.format.schema_) if config and config.format else None,
        **(_sampling(request) if isinstance(request, MessagesRequest) else {}),
    }
    extras = request.model_extra or {}  # those of chat completions
    return {**extras, **{key: value for key, value in own.items() if value is not None}}


def requested_effort(request: CountTokensRequest) -> str | None:
    """How much thinking is asked for, in chat's terms; None leaves it to the model."""
    thinking, config = request.thinking, request.output_config
    if thinking is not None and thinking.type == "disabled":
        return "none"
    if config is not None and config.effort is not None:
        return config.effort if config.effort in ("low", "medium") else "high"
    return _effort_for(thinking) if thinking is not None else None


def ignored_message_fields(request: CountTokensRequest, template: str) -> frozenset[str]:
    """What of it changes nothing."""
    effort = requested_effort(request)
    thoughtless = effort is not None and not can_think(effort, template)
    return MESSAGE_IGNORED_FIELDS | {"thinking", "output_config.effort"} if thoughtless else MESSAGE_IGNORED_FIELDS


def can_think(effort: str, template: str) -> bool:
    """Whether the model has a switch for that."""
    return reasoning_effort_arguments(effort, template) is not None


def translate_error_fields(error: ApiError) -> None:
    """An error from below speaks of chat fields; here it is put into the words of the messages API."""
    if isinstance(error, ContextLengthError):
        # in these words Claude Code sees that it has to compact the conversation, and by how much
        known = f"{error.tokens} tokens > {error.most} maximum"
        error.message = f"prompt is too long: {error.message if error.tokens is None else known}"
    head = (error.param or "").split(".")[0].split("[")[0]
    if head in _NAMES and error.message.startswith(f"{head}:"):
        error.message = _NAMES[head] + error.message[len(head) :]
    renamed = [(f"'{head}", f"'{_NAMES[head]}")] if head in _NAMES else list(_TOOL) if head == "tools" else []
    for theirs, ours in renamed:
        error.message = error.message.replace(theirs, ours)
        error.param = f"'{error.param}".replace(theirs, ours)[1:]


def _refuse_unsupported(request: CountTokensRequest) -> None:
    if request.thread is not None:
        # by this code the SDK knows to send the whole conversation from now on
        said = "thread is not supported: no messages are kept here; send the whole conversation."
        raise UnsupportedError(said, param="thread", code="thread_unsupported_request")
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
    return "low" if budget <= _LOW else "medium" if budget <= _MEDIUM else "high"


def dropped_tool_types(request: CountTokensRequest) -> list[str]:
    """Return the types of the tools that the model is not offered: the client does not describe them."""
    return [tool.type for tool in request.tools or [] if tool.type not in (None, "custom")]


def _functions(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools) if tool.type in (None, "custom")]


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
        raise InvalidRequestError(f"tool_choice is '{choice.type}', but there are no tools.", param="tool_choice")
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise missing_parameter("tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
