"""The rendering of chat messages as a prompt, in the form that chat templates accept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llmops.gateway.errors import InvalidRequestError, UnsupportedError, missing_parameter
from llmops.gateway.generation.parsers.families import detect_family, renders_tools
from llmops.gateway.generation.parsers.reasoning import reasoning_effort_arguments
from llmops.gateway.generation.parsers.tool_messages import (
    CALL_ROLES,
    messages_for_template,
    tools_in_system_message,
)
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import ChatRequest, ContentPart, MessageToolCall, RequestMessage
from llmops.gateway.text.control_tokens import RenderedPrompt

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
#: Fields of a message that belong to tool calls.
_CALL_FIELDS = frozenset({"tool_calls", "tool_call_id"})


def render_chat(
    model: GenerativeModel, body: ChatRequest, tools: Sequence[dict[str, Any]] | None = None
) -> RenderedPrompt:
    """Return the prompt of a chat request.

    Raises:
        InvalidRequestError: The model or its template does not accept these messages.
    """
    if model.template is None:
        raise InvalidRequestError(
            f"The model '{model.name}' has no chat template; use /v1/completions.", param="messages", code="no_template"
        )
    knows_developer = "developer" in model.template.source
    messages = [_template_message(message, position, knows_developer) for position, message in enumerate(body.messages)]
    has_calls = any(not _CALL_FIELDS.isdisjoint(message) or message["role"] in CALL_ROLES for message in messages)
    shows_tools = bool(tools) and renders_tools(model.template.source)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None or body.reasoning is not None:
        variables = _reasoning_effort_variables(body, model) | variables
    if body.documents:
        variables.setdefault("documents", body.documents)

    def render(as_text: bool) -> RenderedPrompt:
        assert model.template is not None
        return model.template.render(
            _with_tools(messages, tools or (), model.template.source, as_text) if tools or has_calls else messages,
            tools=tools if shows_tools else None,
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            variables=variables,
        )

    try:
        prompt = render(as_text=False)
    except InvalidRequestError as error:
        # Most templates expect a call's arguments as an object; DeepSeek's concatenate them with a
        # text.
        if not isinstance(error.__cause__, TypeError) or not any(message.get("tool_calls") for message in messages):
            raise
        prompt = render(as_text=True)
    return _without_turn_end(prompt, messages[-1]) if body.continue_final_message else prompt


def request_texts(body: ChatRequest) -> list[str]:
    """Return every text of a chat request that a template may show to a model."""
    texts: list[object] = []
    for message in body.messages:
        if isinstance(message.content, str):
            texts.append(message.content)
        else:
            for part in message.content or ():
                texts += [part.text, (part.model_extra or {}).get("refusal")]
        for call in message.tool_calls or ():
            texts += [call.function.name, call.function.arguments]
        texts += [message.name, message.refusal, message.reasoning_content, message.reasoning]
    definitions = [tool.function.model_dump(exclude_none=True) for tool in body.tools or () if tool.function]
    for values in (definitions, body.documents, body.chat_template_kwargs):
        if values:
            texts.append(json.dumps(values, ensure_ascii=False, default=str))
    return [text for text in texts if isinstance(text, str) and text]


def _without_turn_end(prompt: RenderedPrompt, last: dict[str, Any]) -> RenderedPrompt:
    """Return the prompt up to the end of the last message, which the answer then continues."""
    text = last["content"].strip()
    at = prompt.text.rfind(text) if last["role"] == "assistant" and text else -1
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message needs an assistant message at the end, whose text the chat template keeps; leave "
            "the field out.",
            param="continue_final_message",
        )
    return prompt.cut(at + len(text))


def _template_message(message: RequestMessage, position: int, knows_developer: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not knows_developer else message.role
    content = message.content if isinstance(message.content, str) else _content(message, position)
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    elif message.role == "tool":
        raise missing_parameter(f"messages[{position}].tool_call_id")
    thinking = message.reasoning_content or message.reasoning
    if isinstance(thinking, str):
        plain["reasoning_content"] = thinking
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
        if isinstance(thinking, str) and not plain["content"]:
            # The name of this field in gpt-oss, for messages that have only calls.
            plain["thinking"] = thinking
    return plain


def _content(message: RequestMessage, position: int) -> str:
    """Return the text of a message whose content is a list of parts or is missing."""
    if message.content is None:
        if message.refusal is None and not _may_be_empty(message):
            raise missing_parameter(f"messages[{position}].content")
        return message.refusal or ""
    assert not isinstance(message.content, str)
    return "\n".join(part_text(part, f"messages[{position}].content[{at}]") for at, part in enumerate(message.content))


def _may_be_empty(message: RequestMessage) -> bool:
    """Return True if a message may lack content: the assistant's, with tool calls or thinking."""
    return message.role == "assistant" and bool(
        message.tool_calls or message.function_call or message.reasoning_content or message.reasoning
    )


def part_text(part: ContentPart, where: str) -> str:
    """Return the text of a part of a message. `where` is its place in the request.

    Raises:
        UnsupportedError: The part is not text.
        InvalidRequestError: The part has no text.
    """
    if part.type not in TEXT_PARTS:
        raise UnsupportedError(
            f"This model takes text only, not a part of type '{part.type}'; send parts of type 'text'.", param=where
        )
    text = part.text if part.text is not None else (part.model_extra or {}).get("refusal")
    if not isinstance(text, str):
        raise missing_parameter(f"{where}.text")
    return text


def _tool_call(call: MessageToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _with_tools(
    messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], source: str, as_text: bool
) -> list[dict[str, Any]]:
    """Return the messages with tools, calls and results in the form that this template accepts."""
    if not renders_tools(source):
        return tools_in_system_message(messages, tools)
    return messages_for_template(messages, mistral_ids=detect_family(source) == "mistral", as_text=as_text)


def _reasoning_effort_variables(body: ChatRequest, model: GenerativeModel) -> dict[str, Any]:
    field = "reasoning_effort" if body.reasoning_effort is not None else "reasoning"
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    if effort is None or model.template is None:
        return {}
    arguments = reasoning_effort_arguments(effort, model.template.source)
    if arguments is None:
        raise UnsupportedError(f"The model '{model.name}' has no {field} to set; leave it out.", param=field)
    return arguments
