"""The base of all tool-call parsers.

The base handles text around calls, holds back possible markers, and numbers the calls.

A parser is a state machine over a growing buffer. In *text*, the parser looks for the opening of a
call and passes all other text at once, except a tail that may still become an opening. In a *call*,
the subclass consumes the buffer. Text that turns out not to be a call is passed unchanged.
"""

from __future__ import annotations

import hashlib
import secrets
import string
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmops.gateway.generation.parsers.json_scanner import InvalidJsonError, JsonScanner
from llmops.gateway.generation.parsers.output_processor import (
    ContentDelta,
    OutputDelta,
    OutputProcessor,
    ToolCallDelta,
    merge_adjacent,
)

Functions = Mapping[str, Mapping[str, Any] | None]
NO_FUNCTIONS: Functions = {}

#: Maximum length of white space next to a marker that belongs to the marker, in characters. Longer
#: white space is passed as text, so that a parser does not hold back any amount of white space.
MAX_HELD_SPACE = 64


_ALPHABET = string.ascii_letters + string.digits


def new_call_id(source: str = "") -> str:
    """Return a call id in OpenAI's format, derived from `source`; random if `source` is empty."""
    return f"call_{_digest(source).hex()[:24]}"


def new_mistral_call_id(source: str = "") -> str:
    """Return a call id of nine letters or digits, the only form that Mistral's templates accept."""
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in _digest(source)[:9])


def _digest(source: str) -> bytes:
    return hashlib.sha256(source.encode()).digest() if source else secrets.token_bytes(32)


class NotAToolCallError(Exception):
    """An error for text that looked like a tool call and is not a call.

    The error is raised only before any part of the call was sent.

    Attributes:
        pos: The position at which plain text continues, which is the place of the mismatch, however
            the text was split. None stands for the parser's current position.
    """

    def __init__(self, pos: int | None = None) -> None:
        super().__init__(pos)
        self.pos = pos


class ToolCallBuilder:
    """A builder of the deltas of one choice's tool calls, which numbers the calls.

    Attributes:
        source: The text that the ids are derived from; empty for random ids.
    """

    def __init__(self, new_id: Callable[[str], str] = new_call_id) -> None:
        self._new_id = new_id
        self.count = 0
        self.source = ""

    def start(self, name: str, call_id: str | None = None) -> ToolCallDelta:
        """Return the first delta of a new call."""
        self.count += 1
        return ToolCallDelta(
            self.count - 1, call_id or self._new_id(self.source and f"{self.source}/{self.count}"), name
        )

    def arguments(self, text: str) -> ToolCallDelta:
        """Return a delta that adds `text` to the arguments of the current call."""
        return ToolCallDelta(self.count - 1, arguments=text)


def held_back_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that more text may complete to a marker.

    This suffix must be held back.
    """
    longest = max(map(len, markers)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0


def trailing_space(text: str) -> int:
    """Return the length of the final white space of `text` that may belong to a marker."""
    return min(len(text) - len(text.rstrip()), MAX_HELD_SPACE)


class CallProcessor(OutputProcessor):
    """The base of all processors whose tool calls change the finish reason to `tool_calls`."""

    def __init__(self, new_id: Callable[[str], str] = new_call_id) -> None:
        self.writer = ToolCallBuilder(new_id)

    def name_calls(self, source: str) -> None:
        self.writer.source = source

    @property
    def made_tool_calls(self) -> bool:
        return self.writer.count > 0


class ToolParser(CallProcessor):
    """The base of the parsers of all model families.

    A method that reads a part of a call returns True on progress, and False if more text is needed.
    """

    #: Name of the family.
    family: str

    #: Texts that identify a chat template whose model writes calls in this format.
    signs: tuple[str, ...] = ()

    #: Order in which signs are looked for. Signs that templates of other families may have too get
    #: a higher rank, and so are looked for later.
    rank = 0

    #: Special tokens that the parser must see, which the detokenizer would otherwise remove.
    special_tokens: tuple[str, ...] = ()

    #: Texts that open a call.
    markers: tuple[str, ...] = ()

    new_id: Callable[[str], str] = staticmethod(new_call_id)
    _buffer: str
    _pos: int

    def __init__(self, tools: Functions = NO_FUNCTIONS) -> None:
        """Create a parser.

        Args:
            tools: The offered functions by name; a call without a marker must name one of them.
        """
        super().__init__(type(self).new_id)
        self.tools = tools
        self._buffer = ""
        self._pos = 0
        self._in_call = False
        self._after_call = False
        # True while nothing of the current call was sent: if the text turns out not to be a call,
        # the text in `_raw` is passed instead.
        self._candidate = False
        self._raw: list[str] = []
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

    # -- for subclasses

    @abstractmethod
    def _consume(self) -> bool:
        """Consume the call at `_pos`. Return True on progress and False if more text is needed."""

    @abstractmethod
    def _begin(self, opening: str) -> None:
        """Start a call after `opening`, the text that opens the call."""

    def _find_opening(self, text: str, start: int) -> tuple[int, int] | None:
        found = [(at, at + len(mark)) for mark in self.markers if (at := text.find(mark, start)) >= 0]
        return min(found) if found else None

    def _held(self, text: str) -> int:
        return held_back_length(text, self.markers)

    @abstractmethod
    def _finish_call(self) -> None:
        """End a call because the text has ended.

        Raises:
            NotAToolCallError: The text is not a call.
        """

    def _new_candidate(self) -> None:
        """Start another possible call, whose text may still turn out not to be a call."""
        self._candidate, self._raw = True, []

    def _leave(self) -> None:
        """Leave the call and continue with text."""
        self._in_call, self._after_call = False, True
        self._candidate, self._raw = False, []

    def _send(self, events: Sequence[OutputDelta]) -> None:
        """Send deltas. The text of the call can then no longer be passed as plain text."""
        if events:
            self._events.extend(events)
            self._candidate, self._raw = False, []

    def _send_arguments(self, text: str) -> None:
        if text:
            self._send([self.writer.arguments(text)])

    def _send_value(self, value: JsonScanner) -> tuple[bool, bool]:
        """Send the part of a JSON value at `_pos` as arguments.

        Returns:
            Two booleans: True if the value is complete, and True if the value is damaged.
        """
        try:
            self._pos, piece, is_complete = value.feed(self._buffer, self._pos)
        except InvalidJsonError as error:
            self._pos = error.end
            self._send_arguments(error.text)
            return False, True
        self._send_arguments(piece)
        return is_complete, False

    def _send_until(self, mark: str) -> bool:
        """Send damaged arguments as they are, up to `mark`. Return True if `mark` was found."""
        at = self._buffer.find(mark, self._pos)
        end = at if at >= 0 else len(self._buffer) - held_back_length(self._buffer[self._pos :], (mark,))
        self._send_arguments(self._buffer[self._pos : end])
        self._pos = end
        return at >= 0

    def _tag_at_position(self, *tags: str) -> str | None:
        """Return the tag at `_pos`; "" if no tag is there; None if more text may complete a tag."""
        for tag in tags:
            if self._buffer.startswith(tag, self._pos):
                return tag
        rest = self._buffer[self._pos : self._pos + max(map(len, tags))]
        return None if any(tag.startswith(rest) for tag in tags) else ""

    def _skip_space(self) -> bool:
        """Skip white space. Return True if other text follows."""
        while self._pos < len(self._buffer) and self._buffer[self._pos].isspace():
            self._pos += 1
        return self._pos < len(self._buffer)

    # -- text

    def _step_text(self) -> bool:
        found = self._find_opening(self._buffer, self._pos)
        if found:
            before = self._buffer[self._pos : found[0]]
            visible = before[: len(before) - trailing_space(before)]
            self._text(visible)
            self._candidate = True
            self._raw = [before[len(visible) :] + self._buffer[found[0] : found[1]]]
            self._in_call, self._pos = True, found[1]
            self._begin(self._buffer[found[0] : found[1]])
            return True
        rest = self._buffer[self._pos :]
        keep = self._held(rest)
        keep += trailing_space(rest[: len(rest) - keep])
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
