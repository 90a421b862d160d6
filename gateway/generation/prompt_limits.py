"""What is too much text, told before any work is done on it."""

from __future__ import annotations

from collections.abc import Sequence

from llmops.gateway.errors import ContextLengthError, InvalidRequestError
from llmops.gateway.http.request_body import json_cost
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import MessageToolCall, RequestMessage
from llmops.gateway.settings import RequestLimits
from llmops.gateway.text.text_thread_pool import THREAD_CHARACTERS


def template_cost(model: GenerativeModel) -> int:
    """What rendering counts for, in characters of a prompt: where it was slow lately, enough for a thread."""
    return THREAD_CHARACTERS if model.template is not None and model.template.is_slow else 0


def check_prompt_characters(characters: int, limits: RequestLimits, param: str) -> None:
    """Raises ContextLengthError for more text than is tokenised for one request."""
    if characters > limits.prompt_bytes:
        raise ContextLengthError(
            f"The prompt has {characters} characters; this gateway takes {limits.prompt_bytes}.", param=param
        )


def check_prompt_text(text: str, model: GenerativeModel, param: str) -> None:
    """Raises ContextLengthError for what cannot fit, however it is tokenised."""
    most = model.card.max_seq_len
    least = model.tokenizer.min_token_count(text, most)
    if least > most:
        raise _context_length_error(model, least, param, "at least ")


def check_prompt_tokens(ids: Sequence[int], model: GenerativeModel, param: str) -> None:
    """The same for tokens."""
    if len(ids) > model.card.max_seq_len:
        raise _context_length_error(model, len(ids), param)


def check_message_limits(messages: Sequence[RequestMessage], limits: RequestLimits) -> None:
    """Raises InvalidRequestError for too many, too long ones, and calls whose arguments hold too many values."""
    if len(messages) > limits.messages:
        raise InvalidRequestError(f"At most {limits.messages} messages are allowed.", param="messages")
    check_prompt_characters(characters(messages), limits, "messages")
    calls = [call for message in messages if message.tool_calls for call in message.tool_calls]
    if calls and sum(map(_argument_weight, calls)) > limits.json_values:
        raise InvalidRequestError("The arguments of the tool calls hold too many JSON values.", param="messages")


def characters(messages: Sequence[RequestMessage]) -> int:
    """Of all that a template may write of them."""
    total = 0
    for message in messages:
        if isinstance(message.content, str):
            total += len(message.content)
        elif message.content:
            total += sum(len(part.text) for part in message.content if part.text)
        if message.tool_calls:
            total += sum(len(call.function.arguments or "") for call in message.tool_calls)
        total += len(message.refusal or "") + len(message.reasoning_content or "")
    return total


def _argument_weight(call: MessageToolCall) -> int:
    return json_cost(call.function.arguments or "")


def _context_length_error(model: GenerativeModel, tokens: int, param: str, about: str = "") -> ContextLengthError:
    most = model.card.max_seq_len
    said = f"This model's maximum context length is {most} tokens, but the prompt has {about}{tokens}. Shorten it."
    return ContextLengthError(said, param=param, tokens=tokens, most=most)
