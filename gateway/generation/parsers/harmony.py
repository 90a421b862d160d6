"""The harmony format of gpt-oss.

An answer is a sequence of messages, each with a header that determines its kind.

`<|channel|>analysis<|message|>` thinking `<|end|><|start|>assistant<|channel|>commentary
to=functions.name <|constrain|>json<|message|>{…}<|call|>`, `<|channel|>final<|message|>` the
answer. The recipient may also precede the channel. A single parser therefore separates thinking,
calls and content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from math import inf

from llmops.gateway.generation.parsers.output_processor import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    merge_adjacent,
)
from llmops.gateway.generation.parsers.tool_parser import CallProcessor, held_back_length

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_NEXT = ("<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([A-Za-z0-9_.\-]{1,128})")
_OPENINGS = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "to=", "assistant")
_MAX_HEADER = 512

#: Text appended to a prompt whose answer follows a grammar, so that the generated text is the
#: answer itself.
FINAL_CHANNEL = "<|channel|>final<|message|>"


@lru_cache(maxsize=64)
def is_harmony(template: str) -> bool:
    """Return True if a chat template writes the harmony format."""
    return "<|channel|>" in template and _MESSAGE in template


class HarmonyParser(CallProcessor):
    """The parser of the harmony format.

    Calls of the model's built-in tools, which the gateway does not run, count as thinking.
    """

    special_tokens = (*_ENDS, *_NEXT, _MESSAGE, "<|constrain|>")

    def __init__(self) -> None:
        super().__init__()
        self._buffer = ""
        self._fed = 0
        self._in_header, self._plain, self._messages = True, False, 0
        self._kind = "final"
        self._spans: list[list[float]] = []

    @property
    def thinking(self) -> Sequence[tuple[int, float]]:
        return [(int(start), end) for start, end in self._spans]

    def feed(self, text: str) -> list[OutputDelta]:
        if self._plain:
            return [ContentDelta(text)] if text else []
        self._fed += len(text)
        self._buffer += text
        deltas: list[OutputDelta] = []
        while self._buffer and (self._header(deltas) if self._in_header else self._body(deltas)):
            pass
        return merge_adjacent(deltas)

    def finish(self) -> list[OutputDelta]:
        rest, self._buffer = self._buffer, ""
        if self._in_header:
            # Part of a header is dropped, but a text without any message is the answer.
            return [ContentDelta(rest)] if rest and not self._messages else []
        return self._deltas(rest)

    def _header(self, deltas: list[OutputDelta]) -> bool:
        at = self._buffer.find(_MESSAGE, 0, _MAX_HEADER)
        if not self._may_be_header() or (at < 0 and len(self._buffer) >= _MAX_HEADER):
            self._plain = True
            deltas.append(ContentDelta(self._buffer))
            self._buffer = ""
            return False
        if at < 0:
            return False
        header, self._buffer = self._buffer[:at], self._buffer[at + len(_MESSAGE) :]
        self._in_header, self._messages = False, self._messages + 1
        self._begin(header, deltas)
        return True

    def _may_be_header(self) -> bool:
        """Return False for the text of a model that does not use harmony.

        After a first message, only headers can follow.
        """
        start = self._buffer.lstrip()
        return bool(self._messages) or any(start.startswith(one) or one.startswith(start) for one in _OPENINGS)

    def _begin(self, header: str, deltas: list[OutputDelta]) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and recipient[1].startswith("functions."):
            self._kind = "call"
            deltas.append(self.writer.start(recipient[1].removeprefix("functions.")))
        else:
            self._kind = "analysis" if recipient or (channel and channel[1] == "analysis") else "final"
        if self._kind == "analysis":
            self._spans.append([self._fed - len(self._buffer), inf])

    def _body(self, deltas: list[OutputDelta]) -> bool:
        marks = (*_ENDS, *_NEXT)
        found = min(((at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0), default=None)
        if found is None:
            keep = held_back_length(self._buffer, marks)
            deltas += self._deltas(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        at, mark = found
        deltas += self._deltas(self._buffer[:at])
        if self._kind == "analysis":
            self._spans[-1][1] = self._fed - len(self._buffer) + at
        self._buffer = self._buffer[at + (len(mark) if mark in _ENDS else 0) :]
        self._in_header = True
        return True

    def _deltas(self, text: str) -> list[OutputDelta]:
        if not text:
            return []
        if self._kind == "call":
            return [self.writer.arguments(text)]
        return [ReasoningDelta(text) if self._kind == "analysis" else ContentDelta(text)]
