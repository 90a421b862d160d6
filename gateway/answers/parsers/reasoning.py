"""Separates thinking from the answer: `<think>…</think>` at the start of the text becomes `reasoning_content`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Any

from llmops.gateway.answers.parsers.base import held_back
from llmops.gateway.answers.parsers.pieces import Piece, Processor, Reasoning, Text

_MAX_HELD_SPACE = 64
# DeepSeek V3.1 calls the switch just `thinking`
_THINKING_SWITCH = re.compile(r"\bthinking\s+is\s+(?:not\s+)?defined\b|\bnot\s+thinking\b")


@dataclass(frozen=True, slots=True)
class ThinkMarkers:
    """The markers around a model's thinking."""

    start: str
    end: str


_KNOWN = (ThinkMarkers("<think>", "</think>"), ThinkMarkers("[THINK]", "[/THINK]"))


def markers_of(template: str) -> ThinkMarkers | None:
    """The markers that the chat template knows; None for a model that does not think."""
    return next((markers for markers in _KNOWN if markers.end in template), None)


def opened_by(prompt: str, markers: ThinkMarkers) -> bool:
    """Whether the rendered prompt itself opens the thinking, so that the text starts inside it."""
    return prompt.rstrip().endswith(markers.start)


class _State(Enum):
    START = auto()
    INSIDE = auto()
    AFTER = auto()
    ANSWER = auto()


class ReasoningSplitter(Processor):
    """White space next to the markers belongs to them; only a block at the very start counts."""

    def __init__(self, markers: ThinkMarkers, inside: bool = False) -> None:
        self._markers = markers
        self._state = _State.INSIDE if inside else _State.START
        self._buffer = ""
        self._fed = 0
        self._span = [0.0, inf] if inside else [inf, inf]
        self._spoken = False  # some thinking was sent, so leading white space is over

    @property
    def thinking(self) -> Sequence[tuple[int, float]]:
        begin, end = self._span
        return ((int(begin), end),) if begin < inf else ()

    def feed(self, text: str) -> list[Piece]:
        self._fed += len(text)
        if self._state is _State.ANSWER:
            return [Text(text)] if text else []
        self._buffer += text
        events: list[Piece] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        if self._state is _State.INSIDE:
            events: list[Piece] = []
            self._buffer = rest
            self._think(_without_held_space(rest), events)
            return events
        return [Text(rest)] if rest and self._state is not _State.AFTER else []

    def _step(self, events: list[Piece]) -> bool:
        if self._state is _State.START:
            return self._start(events)
        if self._state is _State.INSIDE:
            return self._inside(events)
        if self._state is _State.AFTER:
            self._buffer = self._buffer.lstrip()
            self._state = _State.ANSWER if self._buffer else _State.AFTER
            return bool(self._buffer)
        if self._buffer:
            events.append(Text(self._buffer))
        self._buffer = ""
        return False

    def _start(self, events: list[Piece]) -> bool:
        body = self._buffer.lstrip()
        if len(self._buffer) - len(body) <= _MAX_HELD_SPACE:
            if body.startswith(self._markers.start):
                self._buffer, self._state = body[len(self._markers.start) :], _State.INSIDE
                self._span[0] = self._fed - len(self._buffer)
                return True
            if self._markers.start.startswith(body):
                return False
        self._state = _State.ANSWER
        return True

    def _inside(self, events: list[Piece]) -> bool:
        at = self._buffer.find(self._markers.end)
        if at >= 0:
            rest = self._buffer[at + len(self._markers.end) :]
            self._span[1] = self._fed - len(self._buffer) + at
            self._think(_without_held_space(self._buffer[:at]), events)
            self._buffer, self._state = rest, _State.AFTER
            return True
        body = self._buffer[: len(self._buffer) - held_back(self._buffer, (self._markers.end,))]
        self._think(_without_held_space(body), events)
        return False

    def _think(self, text: str, events: list[Piece]) -> None:
        """Send `text`, the beginning of the buffer."""
        self._buffer = self._buffer[len(text) :]
        if not self._spoken:
            text = text.lstrip()
        if text:
            self._spoken = True
            events.append(Reasoning(text))


def _without_held_space(text: str) -> str:
    return text[: len(text) - min(len(text) - len(text.rstrip()), _MAX_HELD_SPACE)]


def template_arguments(effort: str, template: str) -> dict[str, Any] | None:
    """`reasoning_effort` as the arguments its template knows; None if it knows none.

    Templates with a switch (`enable_thinking`, DeepSeek's `thinking`) can only turn thinking on or off.
    """
    known: dict[str, Any] = {}
    if "reasoning_effort" in template:
        known["reasoning_effort"] = effort
    if "enable_thinking" in template:
        known["enable_thinking"] = effort != "none"
    elif _THINKING_SWITCH.search(template):
        known["thinking"] = effort != "none"
    if not known:
        return {} if effort == "none" and markers_of(template) is None else None
    return known
