"""A parser of a tool call that is written as a JSON object and arrives in pieces.

The object is `{"name": …, "arguments": {…}}`, with the keys in any order.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable
from enum import Enum, auto

from llmops.gateway.generation.parsers.json_scanner import InvalidJsonError, JsonScanner
from llmops.gateway.generation.parsers.output_processor import OutputDelta
from llmops.gateway.generation.parsers.tool_parser import NotAToolCallError, ToolCallBuilder, ToolParser

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = (*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type")


class _JsonCallState(Enum):
    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    DONE = auto()
    DAMAGED = auto()


_NEXT = {
    (_JsonCallState.OPEN, "{"): _JsonCallState.KEY,
    (_JsonCallState.KEY, "}"): _JsonCallState.DONE,
    (_JsonCallState.COLON, ":"): _JsonCallState.VALUE,
    (_JsonCallState.COMMA, ","): _JsonCallState.KEY,
    (_JsonCallState.COMMA, "}"): _JsonCallState.DONE,
}


class JsonCallParser:
    """A state machine over one call object.

    The call is sent as soon as its name is known. A call without a marker (`unmarked`) is sent only
    once its arguments begin too, so that ordinary JSON with a `name` is not taken for a call.
    Before that, text that does not fit raises NotAToolCallError. Afterwards nothing can be taken
    back: damaged arguments are sent unchanged (`damaged`; the caller knows where they end), and
    damage elsewhere ends the call.
    """

    def __init__(self, writer: ToolCallBuilder, accept: Callable[[str], bool], unmarked: bool = False) -> None:
        self._writer, self._accept, self._unmarked = writer, accept, unmarked
        self._state = _JsonCallState.OPEN
        self._value = JsonScanner()
        self._key = ""
        self._collected: list[str] = []
        self._name: str | None = None
        self._id: str | None = None
        self._first_character = ""  # First character of the arguments, once known.
        self._early: list[str] = []  # Arguments that cannot be sent yet.
        self._started = False

    @property
    def done(self) -> bool:
        """Return True if the object has ended."""
        return self._state is _JsonCallState.DONE

    @property
    def damaged(self) -> bool:
        """Return True if the arguments are not JSON."""
        return self._state is _JsonCallState.DAMAGED

    def feed(self, text: str, pos: int) -> tuple[int, list[OutputDelta]]:
        """Consume `text` from `pos` on. Return the new position and the deltas.

        Raises:
            NotAToolCallError: The text is not a call.
        """
        deltas: list[OutputDelta] = []
        while pos < len(text) and not self.done and not self.damaged:
            step = self._take_value if self._expects_value(text[pos]) else self._punctuation
            pos = step(text, pos, deltas)
        return pos, deltas

    def end(self) -> list[OutputDelta]:
        """Return the deltas of a call whose text ended before its object did.

        Raises:
            NotAToolCallError: The text is not a call.
        """
        if not self._started:
            raise NotAToolCallError
        return (
            [self._writer.arguments("{}")]
            if not self._first_character and self._state is not _JsonCallState.VALUE
            else []
        )

    def _expects_value(self, char: str) -> bool:
        return self._state is _JsonCallState.VALUE or (
            self._state is _JsonCallState.KEY and (bool(self._collected) or char == '"')
        )

    def _punctuation(self, text: str, pos: int, deltas: list[OutputDelta]) -> int:
        if text[pos].isspace():
            return pos + 1
        follow = _NEXT.get((self._state, text[pos]))
        if follow is None:
            return self._misfit(pos, deltas)
        self._state, self._value, self._collected = follow, JsonScanner(), []
        if follow is _JsonCallState.DONE:
            self._close(pos + 1, deltas)
        return pos + 1

    def _misfit(self, pos: int, deltas: list[OutputDelta]) -> int:
        if not self._started:
            raise NotAToolCallError(pos)
        if self._state is _JsonCallState.VALUE and self._key in _ARGUMENT_KEYS and self._first_character in ("{", "["):
            self._state = _JsonCallState.DAMAGED
        else:
            self._state = _JsonCallState.DONE
            self._close(pos, deltas)
        return pos

    def _take_value(self, text: str, pos: int, deltas: list[OutputDelta]) -> int:
        try:
            end, piece, complete = self._value.feed(text, pos)
        except InvalidJsonError as broken:
            self._piece(broken.text, deltas)
            return self._misfit(broken.end, deltas)
        if self._state is _JsonCallState.KEY and self._unmarked and not self._started:
            self._check_key(piece, pos)
        self._piece(piece, deltas)
        if complete:
            self._complete(end, deltas)
        return end

    def _check_key(self, piece: str, pos: int) -> None:
        """Raise NotAToolCallError if `piece` cannot continue a key that calls have.

        The error has the position of the first wrong character. `pos` is the position of `piece`.
        """
        before = "".join(self._collected)
        for size in range(1, len(piece) + 1):
            word = (before + piece[:size])[1:]
            if not any(key.startswith(word) or word == key + '"' for key in _KEYS):
                raise NotAToolCallError(pos + size - 1)

    def _piece(self, piece: str, deltas: list[OutputDelta]) -> None:
        if not piece:
            return
        if self._state is _JsonCallState.KEY or self._key not in _ARGUMENT_KEYS:
            self._collected.append(piece)
            return
        self._first_character = self._first_character or piece[0]
        self._announce(deltas)
        if self._started and self._first_character in "{[":
            deltas.append(self._writer.arguments(piece))
        else:
            self._early.append(piece)

    def _complete(self, end: int, deltas: list[OutputDelta]) -> None:
        if self._state is _JsonCallState.KEY:
            self._key, self._state = str(_loads("".join(self._collected))), _JsonCallState.COLON
            return
        self._state = _JsonCallState.COMMA
        value = _loads("".join(self._collected))
        if self._key in _NAME_KEYS and not self._name:
            if not isinstance(value, str) or not value or not self._accept(value):
                raise NotAToolCallError(end)
            self._name = value
            self._announce(deltas)
        elif self._key == "id" and isinstance(value, str) and value:
            self._id = value

    def _announce(self, deltas: list[OutputDelta]) -> None:
        if self._started or self._name is None or (self._unmarked and not self._first_character):
            return
        self._started = True
        deltas.append(self._writer.start(self._name, self._id))
        if self._early and self._first_character in "{[":
            deltas.append(self._writer.arguments("".join(self._early)))
            self._early = []

    def _close(self, end: int, deltas: list[OutputDelta]) -> None:
        if not self._started:
            raise NotAToolCallError(end)
        if not self._first_character:
            deltas.append(self._writer.arguments("{}"))
        elif self._first_character not in "{[":
            deltas.append(self._writer.arguments(_as_object_text("".join(self._early))))


class JsonToolParser(ToolParser):
    """The base of the parsers of families that write each call as a JSON object."""

    #: True for calls without a marker: they must name an offered tool, and are sent once their
    #: arguments begin.
    unmarked = False

    def _begin(self, opening: str) -> None:
        self._call: JsonCallParser | None = None

    def _consume(self) -> bool:
        if self._call is None or self._call.done:
            return self._between(self._buffer[self._pos])
        if self._call.damaged:
            return self._consume_damaged()
        self._pos, deltas = self._call.feed(self._buffer, self._pos)
        self._send(deltas)
        return self._pos < len(self._buffer)

    @abstractmethod
    def _between(self, char: str) -> bool:
        """Consume text outside of an object, which begins with `char`.

        Return True on progress, like `_consume`.
        """

    def _open_object(self) -> None:
        """Start the object that begins at `_pos`."""
        if self._call is not None:
            self._new_candidate()
        accept = self.tools.__contains__ if self.unmarked else _accept_any
        self._call = JsonCallParser(self.writer, accept, self.unmarked)

    def _consume_damaged(self) -> bool:
        """Send damaged arguments as they are. Return True on progress, like `_consume`."""
        self._send_arguments(self._buffer[self._pos :])
        self._pos = len(self._buffer)
        return False

    def _finish_call(self) -> None:
        if self._call is None:
            raise NotAToolCallError
        if self._call.damaged:
            self._send_arguments(self._buffer[self._pos :])
        elif not self._call.done:
            self._send(self._call.end())


def _accept_any(name: str) -> bool:
    return True


def _as_object_text(text: str) -> str:
    """Return arguments that are not a JSON object as the text of an object, where possible.

    Some models write the object inside a JSON string, and some write null for no arguments. All
    other text is returned unchanged.
    """
    value = _loads(text)
    if not value:
        return "{}"
    return value if isinstance(value, str) and isinstance(_loads(value), dict) else text


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
