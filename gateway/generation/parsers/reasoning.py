"""A processor that separates thinking from the answer.

`<think>…</think>` at the start of the text becomes `reasoning_content`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from math import inf
from typing import Any

from llmops.gateway.generation.parsers.output_processor import (
    ContentDelta,
    OutputDelta,
    OutputProcessor,
    ReasoningDelta,
)
from llmops.gateway.generation.parsers.tool_parser import MAX_HELD_SPACE, held_back_length, trailing_space

#: Name of a variable in chat templates that switches thinking, in DeepSeek V3.1 and others.
_THINKING_SWITCH = re.compile(r"\bthinking\s+is\s+(?:not\s+)?defined\b|\bnot\s+thinking\b")


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers before and after a model's thinking."""

    start: str
    end: str


_KNOWN = (ReasoningMarkers("<think>", "</think>"), ReasoningMarkers("[THINK]", "[/THINK]"))


@lru_cache(maxsize=64)
def reasoning_markers(template: str) -> ReasoningMarkers | None:
    """Return the markers in the chat template; None for a model that does not think."""
    return next((markers for markers in _KNOWN if markers.end in template), None)


def prompt_opens_reasoning(prompt: str, markers: ReasoningMarkers) -> bool:
    """Return True if the rendered prompt itself opens the thinking.

    The generated text then begins with thinking.
    """
    return prompt.rstrip().endswith(markers.start)


class _ReasoningState(Enum):
    START = auto()
    INSIDE = auto()
    AFTER = auto()
    ANSWER = auto()


class ReasoningParser(OutputProcessor):
    """The parser of thinking.

    Only a block at the very start counts as thinking. White space next to the markers belongs to
    the markers.
    """

    def __init__(self, markers: ReasoningMarkers, inside: bool = False) -> None:
        self._markers = markers
        self._state = _ReasoningState.INSIDE if inside else _ReasoningState.START
        self._buffer = ""
        self._fed = 0
        self._span = [0.0, inf] if inside else [inf, inf]
        # True once thinking was sent, so that leading white space is no longer dropped.
        self._has_sent = False

    @property
    def thinking(self) -> Sequence[tuple[int, float]]:
        begin, end = self._span
        return ((int(begin), end),) if begin < inf else ()

    def feed(self, text: str) -> list[OutputDelta]:
        self._fed += len(text)
        if self._state is _ReasoningState.ANSWER:
            return [ContentDelta(text)] if text else []
        self._buffer += text
        deltas: list[OutputDelta] = []
        while self._step(deltas):
            pass
        return deltas

    def finish(self) -> list[OutputDelta]:
        rest, self._buffer = self._buffer, ""
        if self._state is _ReasoningState.INSIDE:
            deltas: list[OutputDelta] = []
            self._send_thinking(_without_held_space(rest), deltas)
            return deltas
        return [ContentDelta(rest)] if rest and self._state is not _ReasoningState.AFTER else []

    def _step(self, deltas: list[OutputDelta]) -> bool:
        if self._state is _ReasoningState.START:
            return self._start(deltas)
        if self._state is _ReasoningState.INSIDE:
            return self._inside(deltas)
        if self._state is _ReasoningState.AFTER:
            self._buffer = self._buffer.lstrip()
            self._state = _ReasoningState.ANSWER if self._buffer else _ReasoningState.AFTER
            return bool(self._buffer)
        if self._buffer:
            deltas.append(ContentDelta(self._buffer))
        self._buffer = ""
        return False

    def _start(self, deltas: list[OutputDelta]) -> bool:
        body = self._buffer.lstrip()
        if len(self._buffer) - len(body) <= MAX_HELD_SPACE:
            if body.startswith(self._markers.start):
                self._buffer, self._state = body[len(self._markers.start) :], _ReasoningState.INSIDE
                self._span[0] = self._fed - len(self._buffer)
                return True
            if self._markers.start.startswith(body):
                return False
        self._state = _ReasoningState.ANSWER
        return True

    def _inside(self, deltas: list[OutputDelta]) -> bool:
        at = self._buffer.find(self._markers.end)
        if at >= 0:
            rest = self._buffer[at + len(self._markers.end) :]
            self._span[1] = self._fed - len(self._buffer) + at
            self._send_thinking(_without_held_space(self._buffer[:at]), deltas)
            self._buffer, self._state = rest, _ReasoningState.AFTER
            return True
        body = self._buffer[: len(self._buffer) - held_back_length(self._buffer, (self._markers.end,))]
        self._send_thinking(_without_held_space(body), deltas)
        return False

    def _send_thinking(self, text: str, deltas: list[OutputDelta]) -> None:
        """Remove `text` from the beginning of the buffer, and add it to `deltas` as thinking."""
        self._buffer = self._buffer[len(text) :]
        if not self._has_sent:
            text = text.lstrip()
        if text:
            self._has_sent = True
            deltas.append(ReasoningDelta(text))


def _without_held_space(text: str) -> str:
    return text[: len(text) - trailing_space(text)]


def reasoning_effort_arguments(effort: str, template: str) -> dict[str, Any] | None:
    """Return the template's variables for `reasoning_effort`; None if the template has none.

    Templates with a switch (`enable_thinking`, or DeepSeek's `thinking`) can only turn thinking on
    or off.
    """
    known: dict[str, Any] = {}
    if "reasoning_effort" in template:
        known["reasoning_effort"] = effort
    if "enable_thinking" in template:
        known["enable_thinking"] = effort != "none"
    elif _THINKING_SWITCH.search(template):
        known["thinking"] = effort != "none"
    if not known:
        return {} if effort == "none" and reasoning_markers(template) is None else None
    return known
