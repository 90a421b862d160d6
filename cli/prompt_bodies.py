"""The conversion of any API's request bodies to bodies of POST /tokenize, for `llmops prefix`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmops.gateway.api.anthropic import chat_conversion
from llmops.gateway.api.anthropic.chat_conversion import without_session_blocks
from llmops.gateway.api.anthropic.schemas import CountTokensRequest
from llmops.gateway.conversations import chat_translation
from llmops.gateway.conversations.items import parse_input_items
from llmops.gateway.conversations.response_tools import offered_tools
from llmops.gateway.http.request_body import validate_body
from llmops.gateway.schemas.responses_request import ResponsesRequest

#: Fields of a chat-completions body that affect the prompt.
_PROMPT_FIELDS = ("messages", "tools", "add_generation_prompt", "chat_template_kwargs")
_MESSAGES_PARTS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


def prompt_fields(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of POST /tokenize for a request body, and the parts that were left out.

    The fields of a body tell whether it is for chat completions, responses or Anthropic's messages.

    Raises:
        InvalidRequestError: The body is for none of these APIs.
    """
    dropped: list[str] = []
    chat: Mapping[str, Any] = body
    if "input" in body:
        request = validate_body(ResponsesRequest, dict(body))
        tools = offered_tools(request.tools or [])
        chat = chat_translation.to_chat_request(request, parse_input_items(request.input), tools)
    elif _is_messages(body):
        message = validate_body(CountTokensRequest, dict(body))
        message.system, dropped = without_session_blocks(message.system)
        chat = chat_conversion.to_chat_request(message, "")
    fields = {name: chat[name] for name in _PROMPT_FIELDS if chat.get(name) is not None}
    if chat.get("tool_choice") == "none":
        fields.pop("tools", None)
    return fields, dropped


def _is_messages(body: Mapping[str, Any]) -> bool:
    """Return True for a body of Anthropic's messages that is not a chat-completions body, too."""
    if "system" in body or any(isinstance(tool, dict) and "input_schema" in tool for tool in body.get("tools") or []):
        return True
    contents = [one.get("content") for one in body.get("messages") or [] if isinstance(one, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return any(part.get("type") in _MESSAGES_PARTS for part in parts)
