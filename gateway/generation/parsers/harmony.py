"""gpt-oss (harmony): an answer is a sequence of messages, each with a header that says what it is.

`<|channel|>analysis<|message|>` thinking `<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>{…}<|call|>`, `<|channel|>final<|message|>` the answer. The recipient may also stand before
the channel. So thinking, calls and content come apart here all at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf

from llmops.gateway.generation.parsers.output_processor import (
    ContentDelta,
    OutputDelta,
    OutputProcessor,
    ReasoningDelta,
)
from llmops.gateway.generation.parsers.processor_chain import merge_adjacent
from llmops.gateway.generation.parsers.tool_parser import ToolCallBuilder, held_back_length

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_NEXT = ("<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([A-Za-z0-9_.\-]{1,128})")
_OPENINGS = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "to=", "assistant")
_MAX_HEADER = 512

#: what a prompt ends with when a grammar holds the text to the answer itself
FINAL_CHANNEL = "<|channel|>final<|message|>"


def is_harmony(template: str) -> bool:
    return "<|channel|>" in template and _MESSAGE in template


class HarmonyParser(OutputProcessor):
    """Function calls become tool calls; the model's built-in tools, which nobody runs here, count as thinking."""

    special_tokens = (*_ENDS, *_NEXT, _MESSAGE, "<|constrain|>")

    def __init__(self) -> None:
        self._writer = ToolCallBuilder()
        self._buffer = ""
        self._fed = 0
        self._in_header, self._plain, self._messages = True, False, 0
        self._kind = "final"
        self._spans: list[list[float]] = []

    @property
    def made_tool_calls(self) -> bool:
        return self._writer.count > 0

    @property
    def thinking(self) -> Sequence[tuple[int, float]]:
        return [(int(start), end) for start, end in self._spans]

    def feed(self, text: str) -> list[OutputDelta]:
        if self._plain:
            return [ContentDelta(text)] if text else []
        self._fed += len(text)
        self._buffer += text
        pieces: list[OutputDelta] = []
        while self._buffer and (self._header(pieces) if self._in_header else self._body(pieces)):
            pass
        return merge_adjacent(pieces)

    def finish(self) -> list[OutputDelta]:
        rest, self._buffer = self._buffer, ""
        if self._in_header:
            # half a header is nothing, but a text without any message is an answer
            return [ContentDelta(rest)] if rest and not self._messages else []
        return self._said(rest)

    def _header(self, pieces: list[OutputDelta]) -> bool:
        at = self._buffer.find(_MESSAGE, 0, _MAX_HEADER)
        if not self._may_be_header() or (at < 0 and len(self._buffer) >= _MAX_HEADER):
            self._plain = True
            pieces.append(ContentDelta(self._buffer))
            self._buffer = ""
            return False
        if at < 0:
            return False
        header, self._buffer = self._buffer[:at], self._buffer[at + len(_MESSAGE) :]
        self._in_header, self._messages = False, self._messages + 1
        self._begin(header, pieces)
        return True

    def _may_be_header(self) -> bool:
        """A model that does not speak harmony just answers; after a first message nothing else can come."""
        start = self._buffer.lstrip()
        return bool(self._messages) or any(start.startswith(one) or one.startswith(start) for one in _OPENINGS)

    def _begin(self, header: str, pieces: list[OutputDelta]) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and recipient[1].startswith("functions."):
            self._kind = "call"
            pieces.append(self._writer.start(recipient[1].removeprefix("functions.")))
        else:
            self._kind = "analysis" if recipient or (channel and channel[1] == "analysis") else "final"
        if self._kind == "analysis":
            self._spans.append([self._fed - len(self._buffer), inf])

    def _body(self, pieces: list[OutputDelta]) -> bool:
        marks = (*_ENDS, *_NEXT)
        found = min(((at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0), default=None)
        if found is None:
            keep = held_back_length(self._buffer, marks)
            pieces += self._said(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        at, mark = found
        pieces += self._said(self._buffer[:at])
        if self._kind == "analysis":
            self._spans[-1][1] = self._fed - len(self._buffer) + at
        self._buffer = self._buffer[at + (len(mark) if mark in _ENDS else 0) :]
        self._in_header = True
        return True

    def _said(self, text: str) -> list[OutputDelta]:
        if not text:
            return []
        if self._kind == "call":
            return [self._writer.arguments(text)]
        return [ReasoningDelta(text) if self._kind == "analysis" else ContentDelta(text)]
