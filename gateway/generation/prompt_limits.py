"""Size checks that reject a prompt before the gateway renders or tokenizes it."""

from __future__ import annotations

from collections.abc import Sequence

from llmops.gateway.errors import ContextLengthError, InvalidRequestError
from llmops.gateway.http.request_body import json_cost
from llmops.gateway.interfaces import ModelMetadata
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import MessageToolCall, RequestMessage
from llmops.gateway.settings import RequestLimits


def check_prompt_characters(characters: int, limits: RequestLimits, param: str) -> None:
    """Raise ContextLengthError for more text than the gateway tokenizes for one request."""
    if characters > limits.prompt_bytes:
        raise ContextLengthError(
            f"The prompt has {characters} characters; this gateway takes at most {limits.prompt_bytes}. Shorten it.",
            param=param,
        )


def check_prompt_text(text: str, model: GenerativeModel, param: str) -> None:
    """Raise ContextLengthError for a text that does not fit, without tokenizing the whole text."""
    most = model.card.max_seq_len
    least = model.tokenizer.min_token_count(text, most)
    if least > most:
        raise context_length_error(model.card, least, param, "at least ")


def check_prompt_tokens(ids: Sequence[int], model: GenerativeModel, param: str) -> None:
    """Raise ContextLengthError for more tokens than fit into the context window."""
    if len(ids) > model.card.max_seq_len:
        raise context_length_error(model.card, len(ids), param)


def check_message_limits(messages: Sequence[RequestMessage], limits: RequestLimits) -> None:
    """Raise InvalidRequestError for too many or too long messages.

    The error is also raised for tool calls whose arguments have too many JSON values.
    """
    if len(messages) > limits.messages:
        raise InvalidRequestError(
            f"At most {limits.messages} messages are allowed in one request; send fewer.", param="messages"
        )
    check_prompt_characters(max_rendered_characters(messages), limits, "messages")
    calls = [call for message in messages if message.tool_calls for call in message.tool_calls]
    if calls and sum(map(_argument_weight, calls)) > limits.json_values:
        raise InvalidRequestError(
            "The arguments of the tool calls have too many JSON values; leave out old tool calls.", param="messages"
        )


def max_rendered_characters(messages: Sequence[RequestMessage]) -> int:
    """Return the maximum number of characters a template may render for these messages."""
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


def context_length_error(card: ModelMetadata, tokens: int, param: str, about: str = "") -> ContextLengthError:
    """Return the error of a prompt with too many tokens.

    Args:
        card: The metadata of the model.
        tokens: The number of tokens.
        param: The request's field with the prompt.
        about: Text before the number, such as `at least `.
    """
    most = card.max_seq_len
    return ContextLengthError(
        f"This model's maximum context length is {most} tokens, but the prompt has {about}{tokens}. Shorten it.",
        param=param,
        tokens=tokens,
        most=most,
    )
