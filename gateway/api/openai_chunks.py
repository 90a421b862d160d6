"""Server-sent events of a streamed answer. All that does not change within an answer is rendered once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.choice import Choice, TokenLogprob
from llmops.gateway.generation.parsers.output_processor import ContentDelta, OutputDelta, ReasoningDelta, ToolCallDelta

DONE_EVENT = b"data: [DONE]\n\n"


def usage_counts(answer: Answer) -> dict[str, Any]:
    """`usage` of an answer. What the engine does not tell (cached tokens) is left out, not called zero."""
    used = answer.usage
    cached = used.cached_tokens
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        **({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0}}),
        "completion_tokens_details": {
            "reasoning_tokens": used.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


class ChunkWriter:
    """Shared by chat and text completions: the head of each choice's chunk and its tail."""

    kind: str

    def __init__(self, answer_id: str, model: str, created: int, choices: int, *, include_usage: bool) -> None:
        self._head = (
            f'data: {{"id":{json.dumps(answer_id)},"object":"{self.kind}","created":{created},'
            f'"model":{json.dumps(model)},"choices":['
        )
        self._include_usage = include_usage
        nothing = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._end = "}]" + nothing
        self._openings = [self._opening(index) for index in range(choices)]

    def _opening(self, index: int) -> str:
        raise NotImplementedError

    def last(self, usage: dict[str, Any]) -> bytes:
        """The usage chunk, where it was asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE_EVENT
        counts = json.dumps(usage, separators=(",", ":"))
        return f'{self._head}],"usage":{counts}}}\n\n'.encode() + DONE_EVENT


class ChatChunks(ChunkWriter):
    """chat.completion.chunk"""

    kind = "chat.completion.chunk"

    def _opening(self, index: int) -> str:
        return f'{self._head}{{"index":{index},"delta":{{'

    def role(self, index: int) -> bytes:
        return (
            f'{self._openings[index]}"role":"assistant","content":""}},"logprobs":null,"finish_reason":null{self._end}'
        ).encode()

    def content(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        shown = "null" if logprobs is None else json.dumps(chat_logprobs([chat_logprob_entry(one) for one in logprobs]))
        delta = f'"content":{encode_basestring(text)}}},"logprobs":{shown}'
        return f'{self._openings[index]}{delta},"finish_reason":null{self._end}'.encode()

    def piece(self, index: int, piece: OutputDelta) -> bytes:
        if isinstance(piece, ContentDelta):
            return self.content(index, piece.text)
        if isinstance(piece, ReasoningDelta):
            delta = f'"reasoning_content":{encode_basestring(piece.text)}'
        else:
            delta = f'"tool_calls":[{json.dumps(tool_call_chunk(piece), ensure_ascii=False, separators=(",", ":"))}]'
        return f'{self._openings[index]}{delta}}},"logprobs":null,"finish_reason":null{self._end}'.encode()

    def finish(self, choice: Choice) -> bytes:
        return (
            f'{self._openings[choice.index]}}},"logprobs":null,"finish_reason":"{choice.finish_reason}"{self._end}'
        ).encode()


class CompletionChunks(ChunkWriter):
    """text_completion"""

    kind = "text_completion"

    def _opening(self, index: int) -> str:
        return f'{self._head}{{"index":{index},"text":'

    def content(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        shown = "null" if logprobs is None else json.dumps(logprobs)
        return (
            f'{self._openings[index]}{encode_basestring(text)},"logprobs":{shown},"finish_reason":null{self._end}'
        ).encode()

    def finish(self, choice: Choice) -> bytes:
        return (
            f'{self._openings[choice.index]}"","logprobs":null,"finish_reason":"{choice.finish_reason}"{self._end}'
        ).encode()


def tool_call_chunk(piece: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": piece.arguments}
    delta: dict[str, Any] = {"index": piece.index}
    if piece.id is not None:
        delta.update(id=piece.id, type="function")
        function = {"name": piece.name, "arguments": piece.arguments}
    delta["function"] = function
    return delta


def chat_logprobs(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's `logprobs` of a chat choice, with a `chat_logprob_entry` per token."""
    return {"content": entries, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The older form of text completions: four lists side by side."""
    return {
        "tokens": [_shown(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{_shown(token): value for token, value in entry.tops} for entry in entries]
        if any(entry.tops for entry in entries)
        else None,
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprob_entry(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token": _shown(entry.token),
        "logprob": entry.logprob,
        "bytes": list(entry.token),
        "top_logprobs": [
            {"token": _shown(token), "logprob": value, "bytes": list(token)} for token, value in entry.tops
        ],
    }


def _shown(token: bytes) -> str:
    return token.decode("utf-8", "replace")
