"""What every tool-call parser shares: the text around calls, held-back markers, call numbering.

A parser is a state machine over a growing buffer. In *text* it looks for the opening of a call and lets everything
else through at once, except a tail that may still become an opening. In a *call* the subclass consumes. What looked
like a call and turns out not to be one comes out as the text it was.
"""

from __future__ import annotations

import secrets
import string
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmops.gateway.generation.parsers.output_processor import ContentDelta, OutputDelta, OutputProcessor, ToolCallDelta
from llmops.gateway.generation.parsers.processor_chain import merge_adjacent

Functions = Mapping[str, Mapping[str, Any] | None]
_NO_FUNCTIONS: Functions = {}
# White space before an opening belongs to the markup; a longer run than this is text whatever comes next.
_MAX_HELD_SPACE = 64


def new_call_id() -> str:
    """A call id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


def new_mistral_call_id() -> str:
    """Mistral's templates take ids of nine letters or digits and nothing else."""
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(9))


class NotAToolCallError(Exception):
    """What looked like a call is not one; raised only before any of it was sent.

    `pos` is where plain text goes on: always where the mismatch shows, so that it does not depend on how the text was
    split. None is the parser's own position.
    """

    def __init__(self, pos: int | None = None) -> None:
        super().__init__(pos)
        self.pos = pos


class ToolCallBuilder:
    """Numbers the calls of one choice and makes their events."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self.count = 0

    def start(self, name: str, call_id: str | None = None) -> ToolCallDelta:
        self.count += 1
        return ToolCallDelta(self.count - 1, call_id or self._new_id(), name)

    def arguments(self, text: str) -> ToolCallDelta:
        return ToolCallDelta(self.count - 1, arguments=text)


def held_back_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that a marker may still grow from."""
    longest = max(map(len, markers)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0


def _held_space(text: str) -> int:
    return min(len(text) - len(text.rstrip()), _MAX_HELD_SPACE)


class ToolParser(OutputProcessor):
    """Base of the family parsers. `tools` are the functions on offer, by name, with the schema of their parameters.

    What has no marker must name one of them.
    """

    #: its name, and what a chat template has whose calls it reads. Signs that other families' templates may have too
    #: are of a higher rank: they are looked for after all others
    family: str
    signs: tuple[str, ...] = ()
    rank = 0
    #: special tokens the parser has to see; a tokenizer that drops special tokens would hide the call
    special_tokens: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    new_id: Callable[[], str] = staticmethod(new_call_id)
    _buffer: str
    _pos: int

    def __init__(self, tools: Functions = _NO_FUNCTIONS) -> None:
        self.tools = tools
        self.writer = ToolCallBuilder(type(self).new_id)
        self._buffer = ""
        self._pos = 0
        self._in_call = False
        self._after_call = False
        self._candidate = False  # nothing of the call at hand was sent: it may turn out to be none,
        self._raw: list[str] = []  # and then this is the text to give back
        self._events: list[OutputDelta] = []

    def feed(self, text: str) -> list[OutputDelta]:
        self._buffer = self._buffer[self._pos :] + text
        self._pos = 0
        while self._pos < len(self._buffer) and (self._step_call() if self._in_call else self._step_text()):
            pass
        return self._take()

    def finish(self) -> list[OutputDelta]:
        if self._in_call:
            self._end_in_call()
        else:
            self._text(self._buffer[self._pos :])
        self._pos = len(self._buffer)
        return self._take()

    @property
    def made_tool_calls(self) -> bool:
        return self.writer.count > 0

    # -- for subclasses ------------------------------------------------------------------------------------------

    @abstractmethod
    def _consume(self) -> bool:
        """Take what can be taken of the call at `_pos`; True on progress, False when more text is needed."""

    @abstractmethod
    def _begin(self, opening: str) -> None:
        """A call's opening was found; `opening` is its text."""

    def _find_opening(self, text: str, start: int) -> tuple[int, int] | None:
        found = [(at, at + len(mark)) for mark in self.markers if (at := text.find(mark, start)) >= 0]
        return min(found) if found else None

    def _held(self, text: str) -> int:
        return held_back_length(text, self.markers)

    @abstractmethod
    def _finish_call(self) -> None:
        """The text ended inside a call; may raise NotAToolCallError."""

    def _new_candidate(self) -> None:
        """What follows may or may not be another call."""
        self._candidate, self._raw = True, []

    def _leave(self) -> None:
        self._in_call, self._after_call = False, True
        self._candidate, self._raw = False, []

    def _sent(self, events: Sequence[OutputDelta]) -> None:
        if events:
            self._events.extend(events)
            self._candidate, self._raw = False, []

    # -- text ----------------------------------------------------------------------------------------------------

    def _step_text(self) -> bool:
        found = self._find_opening(self._buffer, self._pos)
        if found:
            before = self._buffer[self._pos : found[0]]
            visible = before[: len(before) - _held_space(before)]
            self._text(visible)
            self._candidate = True
            self._raw = [before[len(visible) :] + self._buffer[found[0] : found[1]]]
            self._in_call, self._pos = True, found[1]
            self._begin(self._buffer[found[0] : found[1]])
            return True
        rest = self._buffer[self._pos :]
        keep = self._held(rest)
        keep += _held_space(rest[: len(rest) - keep])
        self._text(rest[: len(rest) - keep])
        self._pos = len(self._buffer) - keep
        return False

    def _text(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._events.append(ContentDelta(text))

    def _step_call(self) -> bool:
        start = self._pos
        try:
            progress = self._consume()
        except NotAToolCallError as misfit:
            self._pos = self._pos if misfit.pos is None else misfit.pos
            self._give_back(self._buffer[start : self._pos])
            return True
        if self._candidate:
            self._raw.append(self._buffer[start : self._pos])
        return progress

    def _end_in_call(self) -> None:
        try:
            self._finish_call()
        except NotAToolCallError:
            self._give_back(self._buffer[self._pos :])

    def _give_back(self, consumed: str) -> None:
        text = "".join(self._raw) + consumed
        self._candidate, self._raw, self._in_call = False, [], False
        self._text(text)

    def _take(self) -> list[OutputDelta]:
        events: list[OutputDelta] = merge_adjacent(self._events)
        self._events = []
        return events
