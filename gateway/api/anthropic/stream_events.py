"""An answer as Anthropic's events: the message, its blocks one after the other, why it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any

from llmops.gateway.api.anthropic.content_blocks import content_block_opening, message_usage, thinking_signature
from llmops.gateway.errors import ApiError
from llmops.gateway.generation.answer import Answer, ChoiceDelta
from llmops.gateway.generation.answer_events import AnswerEvents
from llmops.gateway.generation.choice import Choice
from llmops.gateway.generation.parsers.output_processor import ContentDelta, OutputDelta, ReasoningDelta, ToolCallDelta
from llmops.gateway.http.anthropic_errors import PING

Stop = Callable[[Choice, bool], dict[str, Any]]
_DELTAS: dict[type[OutputDelta], str] = {
    ContentDelta: '"text_delta","text":',
    ReasoningDelta: '"thinking_delta","thinking":',
    ToolCallDelta: '"input_json_delta","partial_json":',
}
_STOPPED = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class MessageEvents(AnswerEvents):
    """`stop` says why a choice ended, given whether it has a call; `failed` makes the event of an error."""

    def __init__(self, answer: Answer, head: dict[str, Any], stop: Stop, failed: Callable[[ApiError], bytes]) -> None:
        super().__init__(answer)
        self._head, self._stop, self._failed = head, stop, failed
        self._begun = self._called = False
        self._index = -1
        self._open: OutputDelta | None = None  # the first piece of the block that is being written
        self._head_of_deltas = ""
        self._thinking: list[str] = []

    def render(self, delta: ChoiceDelta) -> bytes:
        choice, text, _ = delta
        if choice.plain and text and isinstance(self._open, ContentDelta):
            return self._delta(text)
        parts = [] if self._begun else [self._start()]
        for piece in choice.sort(text):
            parts.append(self._piece(piece))
        return b"".join(parts)

    def end(self) -> bytes:
        parts = [] if self._begun else [self._start()]
        stop = self._stop(self._answer.choices[0], self._called)
        last = _event("message_delta", delta=stop, usage=message_usage(self._answer))
        return b"".join([*parts, self._close(), last, _STOPPED])

    def failed(self, error: ApiError) -> bytes:
        return self._failed(error)

    def _start(self) -> bytes:
        self._begun = True
        usage = {**message_usage(self._answer), "output_tokens": 0}
        del usage["output_tokens_details"]
        return _event("message_start", message={**self._head, "usage": usage})

    def _piece(self, piece: OutputDelta) -> bytes:
        opening = b"" if self._goes_on(piece) else self._close() + self._begin(piece)
        if isinstance(piece, ReasoningDelta):
            self._thinking.append(piece.text)
        return opening + self._delta(piece.arguments if isinstance(piece, ToolCallDelta) else piece.text)

    def _goes_on(self, piece: OutputDelta) -> bool:
        open_ = self._open
        if isinstance(piece, ToolCallDelta):
            return isinstance(open_, ToolCallDelta) and piece.index == open_.index
        return type(piece) is type(open_)

    def _begin(self, piece: OutputDelta) -> bytes:
        self._open = piece
        self._index += 1
        self._called = self._called or isinstance(piece, ToolCallDelta)
        self._head_of_deltas = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._index},'
            f'"delta":{{"type":{_DELTAS[type(piece)]}'
        )
        start = _event("content_block_start", index=self._index, content_block=content_block_opening(piece))
        return start if self._index else start + PING

    def _delta(self, text: str) -> bytes:
        return f"{self._head_of_deltas}{encode_basestring(text)}}}}}\n\n".encode("utf-8", "replace") if text else b""

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if isinstance(self._open, ReasoningDelta):
            signature = thinking_signature("".join(self._thinking))
            self._thinking.clear()
            delta = {"type": "signature_delta", "signature": signature}
            signed = _event("content_block_delta", index=self._index, delta=delta)
        self._open = None
        return signed + _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode("utf-8", "replace")
