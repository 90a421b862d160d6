"""The start of a chat that another provider answers, and the choices of the answer.

Such an answer is processed like all others: filters check the text, quotas count the tokens, and
each API renders the answer. Only the source of the text differs.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

from llmops.gateway.errors import UnavailableError
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.app_state import Generation
from llmops.gateway.generation.chat_messages import part_text, request_texts
from llmops.gateway.generation.choice import Choice
from llmops.gateway.generation.parsers.output_processor import (
    ContentDelta,
    OutputDelta,
    OutputProcessor,
    ReasoningDelta,
    ToolCallDelta,
    with_text,
)
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import FINISH_REASONS, FinishReason, TokenBatch, Usage
from llmops.gateway.routing.providers import (
    BYTES_PER_TOKEN,
    ProviderBatch,
    ProviderDelta,
    ProviderModel,
    ProviderStream,
    estimate_tokens,
)
from llmops.gateway.safety.stream_guard import StreamGuard
from llmops.gateway.schemas.chat_request import ChatRequest, RequestMessage
from llmops.gateway.text.detokenizer import Detokenizer

#: Fields that every OpenAI-compatible provider accepts, which are sent unchanged.
_SENT_FIELDS = frozenset(
    {
        *("messages", "temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty"),
        *("tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"),
    }
)
#: Fields of messages that are sent. Others might hold text or images that no filter reads and no
#: quota counts.
_MESSAGE_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("role", "content", "name", "tool_call_id", "refusal", "reasoning_content"), True),
    "tool_calls": {"__all__": {"id": True, "type": True, "function": {"name", "arguments"}}},
}
#: Fields whose loss would change the answer. A request with one of these fields does not overflow
#: to a provider.
_NEEDED_FIELDS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "logit_bias"),
    *("logprobs", "stop_token_ids", "bad_words", "min_tokens", "ignore_eos", "continue_final_message", "documents"),
    *("chat_template_kwargs", "include_stop_str_in_output", "prompt_logprobs"),
)
#: Fields that concern only this gateway, or are sent in another form.
_OWN_FIELDS = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "user", "metadata"}
)
#: Estimated number of tokens that a chat template adds to each message.
_TOKENS_PER_MESSAGE = 8

#: Maximum UTF-8 bytes per token of `max_tokens` before a provider counts as not stopping at this
#: maximum: most tokens have at most 16 bytes.
MAX_BYTES_PER_TOKEN = 64
#: UTF-8 bytes that an answer may have in addition to `MAX_BYTES_PER_TOKEN` for each token, so that
#: short answers are not cut.
MAX_UNCOUNTED_BYTES = 16_384


async def start_provider_chat(chat: Generation[ChatRequest], model: ProviderModel) -> Answer:
    """Send a chat to a provider and return its answer.

    Raises:
        UnavailableError: The request has a field that providers do not support.
        RateLimitError: The caller's quota or budget does not allow the chat at the provider's
            price.
    """
    body, context, default = chat.body, chat.context, chat.state.default_tokens
    fields = _translate(body, model, context)
    texts = request_texts(body)
    if "response_format" in fields:
        # The provider's model reads the descriptions in the schema.
        texts.append(json.dumps(fields["response_format"], ensure_ascii=False))
    prompt_tokens = sum(estimate_tokens(text) for text in texts)
    prompt_tokens += _TOKENS_PER_MESSAGE * len(body.messages)
    requested = body.max_completion_tokens or body.max_tokens
    most = requested or default or max(model.card.max_seq_len - prompt_tokens, 1)
    n, max_tokens = body.n or 1, most
    if context.reservation is not None:
        reserved = await context.reservation.tokens(model.name, prompt_tokens, n * most, n, requested is not None)
        max_tokens = reserved // n
    if requested or default or max_tokens < most:
        fields["max_completion_tokens" if body.max_completion_tokens else "max_tokens"] = max_tokens
    last = body.messages[-1]
    # Providers continue a last message of the assistant.
    before = last.content if last.role == "assistant" and isinstance(last.content, str) else ""
    safety = chat.state.safety
    if safety is not None:
        sent = json.dumps(fields, ensure_ascii=False)
        await safety.check_prompt(texts, context.caller, sent, end_user=context.end_user)
    choices: list[Choice] = [
        ProviderChoice(
            index, max_tokens, safety.guard(context.caller, before, context.end_user) if safety is not None else None
        )
        for index in range(n)
    ]
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    stream = model.open(fields, context.caller.share)
    context.mark("submit")
    return chat.answer(ProviderAnswer, stream, choices, prompt_tokens)


def _translate(body: ChatRequest, model: ProviderModel, context: RequestContext) -> dict[str, Any]:
    """Return a request's fields to send to a provider, and record the fields left out.

    Raises:
        UnavailableError: A field is needed and cannot be sent.
        UnsupportedError: A part of a message is not text.
    """
    for name in _NEEDED_FIELDS:
        value = getattr(body, name)
        # The value 0 is not empty here: it requests the log-probabilities of the prompt's own
        # tokens.
        if value not in (None, False, 0, {}, []) or (name == "prompt_logprobs" and value is not None):
            raise UnavailableError(
                f"The models here are full or unavailable, and {model.name} does not support {name}; try again later, "
                f"or leave {name} out.",
                code="overloaded",
            )
    fields = body.model_dump(exclude={"messages", "tools"}, exclude_none=True, exclude_unset=True, by_alias=True)
    sent = {name: value for name, value in fields.items() if name in _SENT_FIELDS}
    sent["messages"] = [_message(message, at) for at, message in enumerate(body.messages)]
    if body.tools:
        sent["tools"] = [
            {"type": tool.type, "function": tool.function.model_dump(exclude_none=True)} for tool in body.tools
        ]
    # Unknown fields were already reported, by names that are safe to show.
    known = fields.keys() - (body.model_extra or {}).keys()
    context.ignored_fields += sorted(known - _SENT_FIELDS - _OWN_FIELDS - set(context.ignored_fields))
    return sent


def _message(message: RequestMessage, position: int) -> dict[str, Any]:
    """Return the fields of a message that quotas and filters know.

    Raises:
        UnsupportedError: A part of the message is not text.
    """
    sent = message.model_dump(include=_MESSAGE_FIELDS, exclude_none=True, exclude_unset=True)
    if isinstance(message.reasoning, str):
        sent["reasoning"] = message.reasoning
    if isinstance(message.content, list):
        where = f"messages[{position}].content"
        texts = [part_text(part, f"{where}[{at}]") for at, part in enumerate(message.content)]
        sent["content"] = [{"type": "text", "text": text} for text in texts]
    return sent


class ProviderAnswer(Answer):
    """An answer whose tokens a provider counts. The counts are estimates until the last event."""

    @property
    def usage(self) -> Usage:
        """Return the provider's counts; estimates while the answer runs, or if it was cut off."""
        reported = cast(ProviderStream, self._stream).usage
        return reported if reported is not None else super().usage


class ProviderChoice(Choice):
    """A choice whose text comes from a provider, already split into content, thinking and tool calls."""

    def __init__(self, index: int, max_tokens: int, guard: StreamGuard | None) -> None:
        """Create an empty choice of at most `max_tokens` tokens, whose text `guard` filters."""
        self._segments = SegmentProcessor()
        # This class overrides `feed` and `finish`, so no detokenizer is used.
        super().__init__(index, cast(Detokenizer, None), max_tokens=max_tokens, processor=self._segments, guard=guard)
        if guard is not None:
            guard.waits = True  # for the threads that search a delta of a megabyte
        self._deltas = self._pieces = self._bytes = 0

    def feed(self, batch: TokenBatch) -> str:
        """Add a delta, and return its text of all kinds; `sort` splits the text by kind."""
        if self.done:
            return ""
        choice = cast(ProviderBatch, batch).choice
        pieces = list(_pieces(choice.delta))
        text = "".join(map(self._segments.add, pieces))
        self._pieces += len(pieces)
        # The names of functions are generated tokens, too.
        generated = text + "".join(piece.name or "" for piece in pieces if isinstance(piece, ToolCallDelta))
        if generated:
            self._deltas += 1
            self._bytes += len(generated.encode("utf-8", "replace"))
            estimate = max(self._deltas, self._bytes // BYTES_PER_TOKEN)
            self.completion_tokens = min(estimate, self.max_tokens)
        if choice.finish_reason is not None:
            self.done, self.finish_reason = True, _finish_reason(choice.finish_reason)
        elif self._bytes + self._pieces > MAX_BYTES_PER_TOKEN * self.max_tokens + MAX_UNCOUNTED_BYTES:
            self.done = self.overran = True
        return self._filter(text)

    def finish(self) -> str:
        """End a choice for which the provider sent no finish reason."""
        if self.done:
            return ""
        self.done, self.finish_reason = True, "stop"
        return self._filter("")


class SegmentProcessor(OutputProcessor):
    """A processor that knows the kind of each part of the text, because the provider sent it.

    Filters only delay or cut text, so the text they release is a prefix of the added text.
    """

    def __init__(self) -> None:
        self._waiting: deque[OutputDelta] = deque()

    def add(self, piece: OutputDelta) -> str:
        """Add a part, and return its text."""
        self._waiting.append(piece)
        return piece.text

    def feed(self, text: str) -> Iterator[OutputDelta]:
        left = len(text)
        while self._waiting and (left or not self._waiting[0].text):
            piece = self._waiting.popleft()
            whole = piece.text
            if len(whole) > left:
                yield with_text(piece, whole[:left])
                # Send the head of a tool call only once.
                rest = ToolCallDelta(piece.index) if isinstance(piece, ToolCallDelta) else piece
                self._waiting.appendleft(with_text(rest, whole[left:]))
                return
            left -= len(whole)
            yield piece

    def finish(self) -> Iterator[OutputDelta]:
        return self.feed("")


def _pieces(delta: ProviderDelta) -> Iterator[OutputDelta]:
    """Yield the parts of a chunk's delta."""
    if reasoning := delta.reasoning_content or delta.reasoning:
        yield ReasoningDelta(reasoning)
    if content := delta.content or delta.refusal:
        yield ContentDelta(content)
    for call in delta.tool_calls or ():
        function = call.function
        call_id, name = (call.id, function.name) if call.id and function.name else (None, None)
        yield ToolCallDelta(call.index, call_id, name, function.arguments or "")


def _finish_reason(reason: str) -> FinishReason:
    return cast(FinishReason, reason) if reason in FINISH_REASONS else "stop"
