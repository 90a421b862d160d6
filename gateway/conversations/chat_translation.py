"""The translation of a request to the Responses API into a request to chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmops.gateway.conversations.items import Item, to_messages
from llmops.gateway.conversations.response_tools import OfferedTools, flat_name
from llmops.gateway.errors import ApiError, InvalidRequestError, UnsupportedError
from llmops.gateway.schemas.responses_request import ResponsesRequest, TextFormat

# Names in the Responses API of the fields of chat completions, for errors.
_RESPONSES_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def to_chat_request(request: ResponsesRequest, items: Sequence[Item], tools: OfferedTools) -> dict[str, Any]:
    """Return the body of the chat completions request that is equivalent to `request`.

    Args:
        request: The request to the Responses API.
        items: The whole context of the request, including stored items.
        tools: The functions that the model may call.
    """
    _refuse_unsupported(request)
    body: dict[str, Any] = {
        # Sampling fields beyond OpenAI's, which chat completions has too.
        **(request.model_extra or {}),
        "model": request.model,
        "messages": to_messages(items, request.instructions),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tools": tools.functions or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _format(request.text.format if request.text else None),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "user": request.user,
        "stream": True,
    }
    return {key: value for key, value in body.items() if value is not None}


def translate_error_fields(error: ApiError) -> None:
    """Translate field names of chat completions in an error into names of the Responses API.

    The layers below the Responses API name the fields of chat completions.
    """
    head = (error.param or "").split(".")[0].split("[")[0]
    error.param = _RESPONSES_FIELDS.get(head, error.param)
    if head in _RESPONSES_FIELDS:
        error.message = error.message.replace(f"'{head}", f"'{_RESPONSES_FIELDS[head]}")


def _refuse_unsupported(request: ResponsesRequest) -> None:
    if request.prompt is not None:
        raise UnsupportedError("'prompt' is not supported; send the items in 'input'.", param="prompt")
    if request.truncation == "auto":
        raise UnsupportedError("Only truncation 'disabled' is supported; leave truncation out.", param="truncation")
    if request.top_logprobs:
        raise UnsupportedError(
            "top_logprobs is supported in chat completions only; leave top_logprobs out.", param="top_logprobs"
        )
    if request.background and request.store is False:
        raise InvalidRequestError(
            "background needs store, because the answer is fetched later; set store to true.", param="background"
        )


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        name = choice.get("name")
        flat = flat_name(name, choice.get("namespace")) if isinstance(name, str) else name
        return {"type": "function", "function": {"name": flat}}
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        tools = [_tool_choice(tool) for tool in allowed if isinstance(tool, dict)] if isinstance(allowed, list) else []
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    raise UnsupportedError(
        f"A tool_choice of type '{choice.get('type')}' is not supported; use 'function' or 'allowed_tools'.",
        param="tool_choice",
    )


def _format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type != "json_schema":
        return {"type": form.type} if form else None
    schema = {"name": form.name, "description": form.description, "schema": form.schema_, "strict": form.strict}
    return {"type": "json_schema", "json_schema": {key: value for key, value in schema.items() if value is not None}}
