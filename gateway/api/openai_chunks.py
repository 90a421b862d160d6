"""The chunks of OpenAI's streams, as server-sent events.

The parts that do not change within an answer are rendered once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

from llmops.gateway.generation.choice import Choice, TokenLogprob
from llmops.gateway.generation.parsers.output_processor import ContentDelta, OutputDelta, ReasoningDelta, ToolCallDelta
from llmops.gateway.interfaces import Usage
from llmops.gateway.schemas.request_fields import SamplingFields

DONE_EVENT = b"data: [DONE]\n\n"


class HasUsage(Protocol):
    """An object with token counts, such as a running or a finished answer."""

    @property
    def usage(self) -> Usage: ...


def usage_counts(answer: HasUsage) -> dict[str, Any]:
    """Return the `usage` object of an answer.

    The object has no cached tokens if the engine does not report them.
    """
    usage = answer.usage
    cached = usage.cached_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0}}),
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


class ChunkWriter:
    """A writer of one answer's chunks.

    The parts that all chunks share are rendered once.
    """

    #: The value of `object` in each chunk.
    kind: str
    #: The beginning of a choice's JSON, with %d for the choice's index.
    opening: str

    def __init__(self, answer_id: str, body: SamplingFields, created: int, choices: int) -> None:
        """Prepare the chunks of an answer.

        Args:
            answer_id: The answer's public id.
            body: The request.
            created: The Unix time at which the answer started, in seconds.
            choices: The number of choices.
        """
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = (
            f'data: {{"id":{json.dumps(answer_id)},"object":"{self.kind}","created":{created},'
            f'"model":{json.dumps(body.model)},"choices":['
        )
        self._end = '}],"usage":null}\n\n' if self._include_usage else "}]}\n\n"
        self._openings = [self._head + self.opening % index for index in range(choices)]

    def last(self, answer: HasUsage) -> bytes:
        """Return the usage chunk, if the client requested it, and the [DONE] event."""
        if not self._include_usage:
            return DONE_EVENT
        counts = json.dumps(usage_counts(answer), separators=(",", ":"))
        return f'{self._head}],"usage":{counts}}}\n\n'.encode() + DONE_EVENT


class ChatChunks(ChunkWriter):
    """A writer of the chunks of a chat completion."""

    kind = "chat.completion.chunk"
    opening = '{"index":%d,"delta":{'

    def role(self, index: int) -> bytes:
        """Return the first chunk of a choice, which has its role."""
        return (
            f'{self._openings[index]}"role":"assistant","content":""}},"logprobs":null,"finish_reason":null{self._end}'
        ).encode()

    def content(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """Return a chunk of text, with log-probabilities if the request asks for them."""
        logprobs_json = (
            "null" if logprobs is None else json.dumps(chat_logprobs([chat_logprob_entry(one) for one in logprobs]))
        )
        delta = f'"content":{encode_basestring(text)}}},"logprobs":{logprobs_json}'
        return f'{self._openings[index]}{delta},"finish_reason":null{self._end}'.encode()

    def piece(self, index: int, piece: OutputDelta) -> bytes:
        """Return the chunk for a piece of content, reasoning or a tool call."""
        if isinstance(piece, ContentDelta):
            return self.content(index, piece.text)
        if isinstance(piece, ReasoningDelta):
            delta = f'"reasoning_content":{encode_basestring(piece.text)}'
        else:
            delta = f'"tool_calls":[{json.dumps(tool_call_chunk(piece), ensure_ascii=False, separators=(",", ":"))}]'
        return f'{self._openings[index]}{delta}}},"logprobs":null,"finish_reason":null{self._end}'.encode()

    def finish(self, index: int, reason: str) -> bytes:
        """Return the last chunk of a choice, which has the finish reason."""
        return f'{self._openings[index]}}},"logprobs":null,"finish_reason":"{reason}"{self._end}'.encode()


class CompletionChunks(ChunkWriter):
    """A writer of the chunks of a text completion."""

    kind = "text_completion"
    opening = '{"index":%d,"text":'

    def content(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        """Return a chunk of text, with log-probabilities if the request asks for them."""
        logprobs_json = "null" if logprobs is None else json.dumps(logprobs)
        return (
            f'{self._openings[index]}{encode_basestring(text)},"logprobs":{logprobs_json},"finish_reason":null{self._end}'
        ).encode()

    def finish(self, choice: Choice) -> bytes:
        """Return the last chunk of a choice, which has the finish reason."""
        return (
            f'{self._openings[choice.index]}"","logprobs":null,"finish_reason":"{choice.finish_reason}"{self._end}'
        ).encode()


def message_of(pieces: Sequence[OutputDelta]) -> dict[str, Any]:
    """Return the assistant message that the pieces of a stream add up to."""
    calls: dict[int, ToolCallDelta] = {}
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            begun = calls.get(piece.index)
            calls[piece.index] = begun._replace(arguments=begun.arguments + piece.arguments) if begun else piece
    content = "".join(piece.text for piece in pieces if isinstance(piece, ContentDelta))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_complete_call(calls[index]) for index in sorted(calls)]
    return message


def _complete_call(call: ToolCallDelta) -> dict[str, Any]:
    complete = tool_call_chunk(call)
    del complete["index"]
    return complete


def tool_call_chunk(piece: ToolCallDelta) -> dict[str, Any]:
    """Return an entry of `tool_calls` in a delta.

    Only the entry for the first piece of a call has the call's id and name.
    """
    function: dict[str, Any] = {"arguments": piece.arguments}
    delta: dict[str, Any] = {"index": piece.index}
    if piece.id is not None:
        delta.update(id=piece.id, type="function")
        function = {"name": piece.name, "arguments": piece.arguments}
    delta["function"] = function
    return delta


def chat_logprobs(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice. Entries are made by `chat_logprob_entry`."""
    return {"content": entries, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the `logprobs` of a text completion: four lists with an item per token."""
    return {
        "tokens": [_token_text(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{_token_text(token): value for token, value in entry.tops} for entry in entries]
        if any(entry.tops for entry in entries)
        else None,
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprob_entry(entry: TokenLogprob) -> dict[str, Any]:
    """Return the log-probability of a token and of its alternatives, for a chat choice."""
    return {
        "token": _token_text(entry.token),
        "logprob": entry.logprob,
        "bytes": list(entry.token),
        "top_logprobs": [
            {"token": _token_text(token), "logprob": value, "bytes": list(token)} for token, value in entry.tops
        ],
    }


def _token_text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
