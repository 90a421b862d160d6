"""From messages to prompt text, as chat templates want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmops.gateway.errors import InvalidRequestError, UnsupportedError
from llmops.gateway.openai.reasoning import template_arguments
from llmops.gateway.openai.tools.families import family_of, knows_tools
from llmops.gateway.openai.tools.prompting import through_system_message, with_parsed_arguments
from llmops.gateway.openai.types.chat import ChatRequest, ContentPart, Message, MessageToolCall
from llmops.gateway.serving import ServedModel

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


def render_chat(model: ServedModel, body: ChatRequest, tools: Sequence[dict[str, Any]] | None = None) -> str:
    """The prompt text. Raises InvalidRequestError for messages that this model or its template does not take."""
    if model.template is None:
        raise InvalidRequestError(
            f"The model '{model.name}' has no chat template; use /v1/completions.", param="messages", code="no_template"
        )
    knows_developer = "developer" in model.template.source
    messages = [_plain(message, position, knows_developer) for position, message in enumerate(body.messages)]
    messages = _with_tools(messages, tools or (), model.template.source)
    variables = {**_effort(body, model), **(body.chat_template_kwargs or {})}
    if body.documents:
        variables.setdefault("documents", body.documents)
    return model.template.render(
        messages,
        tools=(tools or None) if knows_tools(model.template.source) else None,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        variables=variables,
    )


def _plain(message: Message, position: int, knows_developer: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not knows_developer else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message, position)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    thinking = message.reasoning_content or message.reasoning
    if isinstance(thinking, str):
        plain["reasoning_content"] = thinking
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return plain


def _content(message: Message, position: int) -> str:
    if message.content is None:
        return message.refusal or ""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(_part(part, f"messages[{position}].content[{at}]") for at, part in enumerate(message.content))


def _part(part: ContentPart, where: str) -> str:
    if part.type not in TEXT_PARTS:
        raise UnsupportedError(f"This model takes text only, not a part of type '{part.type}'.", param=where)
    text = part.text if part.text is not None else (part.model_extra or {}).get("refusal")
    if not isinstance(text, str):
        raise InvalidRequestError(f"Missing required parameter: '{where}.text'.", param=f"{where}.text")
    return text


def _tool_call(call: MessageToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Calls and results in the form that this template takes."""
    if not knows_tools(source):
        return through_system_message(messages, tools)
    return with_parsed_arguments(messages, mistral_ids=family_of(source) == "mistral")


def _effort(body: ChatRequest, model: ServedModel) -> dict[str, Any]:
    field = "reasoning_effort" if body.reasoning_effort is not None else "reasoning"
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    if effort is None or model.template is None:
        return {}
    arguments = template_arguments(effort, model.template.source)
    if arguments is None:
        raise UnsupportedError(f"The model '{model.name}' has no {field} to set.", param=field)
    return arguments
