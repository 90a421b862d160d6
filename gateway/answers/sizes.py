"""What is too much text, told before any work is done on it."""

from __future__ import annotations

from collections.abc import Sequence

from llmops.gateway.errors import ContextLengthError, InvalidRequestError
from llmops.gateway.fleet.serving import ServedModel
from llmops.gateway.http.weight import weight
from llmops.gateway.openai.chat import Message, MessageToolCall
from llmops.gateway.settings import RequestLimits
from llmops.gateway.text.threads import INLINE_CHARACTERS


def work_of_template(model: ServedModel) -> int:
    """What rendering counts for, in characters of a prompt: where it was slow lately, enough for a thread."""
    return INLINE_CHARACTERS + 1 if model.template is not None and model.template.is_slow else 0


def check_length(characters: int, limits: RequestLimits, param: str) -> None:
    """Raises ContextLengthError for more text than is tokenised for one request."""
    if characters > limits.prompt_bytes:
        raise ContextLengthError(
            f"The prompt has {characters} characters; this gateway takes {limits.prompt_bytes}.", param=param
        )


def check_text(text: str, model: ServedModel, param: str) -> None:
    """Raises ContextLengthError for what cannot fit, however it is tokenised."""
    most = model.card.max_seq_len
    least = model.tokenizer.least_tokens(text, most)
    if least > most:
        raise _too_long(model, least, param, "at least ")


def check_ids(ids: Sequence[int], model: ServedModel, param: str) -> None:
    """The same for tokens."""
    if len(ids) > model.card.max_seq_len:
        raise _too_long(model, len(ids), param)


def check_messages(messages: Sequence[Message], limits: RequestLimits) -> None:
    """Raises InvalidRequestError for too many, too long ones, and calls whose arguments hold too many values."""
    if len(messages) > limits.messages:
        raise InvalidRequestError(f"At most {limits.messages} messages are allowed.", param="messages")
    check_length(characters(messages), limits, "messages")
    calls = [call for message in messages if message.tool_calls for call in message.tool_calls]
    if calls and sum(map(_weight_of_arguments, calls)) > limits.json_values:
        raise InvalidRequestError("The arguments of the tool calls hold too many JSON values.", param="messages")


def characters(messages: Sequence[Message]) -> int:
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


def _weight_of_arguments(call: MessageToolCall) -> int:
    return weight(call.function.arguments or "")


def _too_long(model: ServedModel, tokens: int, param: str, about: str = "") -> ContextLengthError:
    most = model.card.max_seq_len
    said = f"This model's maximum context length is {most} tokens, but the prompt has {about}{tokens}. Shorten it."
    return ContextLengthError(said, param=param, tokens=tokens, most=most)
