"""One call written as a JSON object: `{"name": …, "arguments": {…}}` in any key order, fed in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum, auto

from llmops.gateway.answers.parsers.base import CallWriter, NotACall
from llmops.gateway.answers.parsers.json_text import BrokenJson, JsonValue
from llmops.gateway.answers.parsers.pieces import Piece

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = (*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type")


class _State(Enum):
    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    DONE = auto()
    DAMAGED = auto()


_NEXT = {
    (_State.OPEN, "{"): _State.KEY,
    (_State.KEY, "}"): _State.DONE,
    (_State.COLON, ":"): _State.VALUE,
    (_State.COMMA, ","): _State.KEY,
    (_State.COMMA, "}"): _State.DONE,
}


class CallObject:
    """State machine over one call object.

    The call is announced as soon as its name is known; without a marker around it (`unmarked`), only once its
    arguments begin too, so that ordinary JSON with a `name` is not taken for a call. What does not fit before that
    raises NotACall. Afterwards nothing can be taken back: damage inside the arguments goes into them as it is
    (`damaged`, the parser says where it ends), any other ends the call there.
    """

    def __init__(self, writer: CallWriter, accept: Callable[[str], bool], unmarked: bool = False) -> None:
        self._writer, self._accept, self._unmarked = writer, accept, unmarked
        self._state = _State.OPEN
        self._value = JsonValue()
        self._key = ""
        self._collected: list[str] = []
        self._name: str | None = None
        self._id: str | None = None
        self._kind = ""  # first character of the arguments
        self._early: list[str] = []  # arguments that cannot be sent yet
        self._started = False

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def damaged(self) -> bool:
        return self._state is _State.DAMAGED

    def feed(self, text: str, pos: int) -> tuple[int, list[Piece]]:
        """The position after what was consumed, and the events; raises NotACall."""
        events: list[Piece] = []
        while pos < len(text) and not self.done and not self.damaged:
            step = self._take_value if self._expects_value(text[pos]) else self._punctuation
            pos = step(text, pos, events)
        return pos, events

    def damage(self, text: str) -> list[Piece]:
        """More text of damaged arguments."""
        return [self._writer.arguments(text)] if text else []

    def end(self) -> list[Piece]:
        """The text ended before the object did."""
        if not self._started:
            raise NotACall
        return [self._writer.arguments("{}")] if not self._kind and self._state is not _State.VALUE else []

    def _expects_value(self, char: str) -> bool:
        return self._state is _State.VALUE or (self._state is _State.KEY and (bool(self._collected) or char == '"'))

    def _punctuation(self, text: str, pos: int, events: list[Piece]) -> int:
        if text[pos].isspace():
            return pos + 1
        follow = _NEXT.get((self._state, text[pos]))
        if follow is None:
            return self._misfit(pos, events)
        self._state, self._value, self._collected = follow, JsonValue(), []
        if follow is _State.DONE:
            self._close(pos + 1, events)
        return pos + 1

    def _misfit(self, pos: int, events: list[Piece]) -> int:
        if not self._started:
            raise NotACall(pos)
        if self._state is _State.VALUE and self._key in _ARGUMENT_KEYS and self._kind in ("{", "["):
            self._state = _State.DAMAGED
        else:
            self._state = _State.DONE
            self._close(pos, events)
        return pos

    def _take_value(self, text: str, pos: int, events: list[Piece]) -> int:
        try:
            end, piece, complete = self._value.feed(text, pos)
        except BrokenJson as broken:
            self._piece(broken.text, events)
            return self._misfit(broken.end, events)
        if self._state is _State.KEY and self._unmarked and not self._started:
            self._check_key(piece, pos)
        self._piece(piece, events)
        if complete:
            self._complete(end, events)
        return end

    def _check_key(self, piece: str, pos: int) -> None:
        """Raise NotACall at the first character that no key of a call has there."""
        before = "".join(self._collected)
        for size in range(1, len(piece) + 1):
            word = (before + piece[:size])[1:]
            if not any(key.startswith(word) or word == key + '"' for key in _KEYS):
                raise NotACall(pos + size - 1)

    def _piece(self, piece: str, events: list[Piece]) -> None:
        if not piece:
            return
        if self._state is _State.KEY or self._key not in _ARGUMENT_KEYS:
            self._collected.append(piece)
            return
        self._kind = self._kind or piece[0]
        self._announce(events)
        if self._started and self._kind in "{[":
            events.append(self._writer.arguments(piece))
        else:
            self._early.append(piece)

    def _complete(self, end: int, events: list[Piece]) -> None:
        if self._state is _State.KEY:
            self._key, self._state = str(_loads("".join(self._collected))), _State.COLON
            return
        self._state = _State.COMMA
        value = _loads("".join(self._collected))
        if self._key in _NAME_KEYS and not self._name:
            if not isinstance(value, str) or not value or not self._accept(value):
                raise NotACall(end)
            self._name = value
            self._announce(events)
        elif self._key == "id" and isinstance(value, str) and value:
            self._id = value

    def _announce(self, events: list[Piece]) -> None:
        if self._started or self._name is None or (self._unmarked and not self._kind):
            return
        self._started = True
        events.append(self._writer.start(self._name, self._id))
        if self._early and self._kind in "{[":
            events.append(self._writer.arguments("".join(self._early)))
            self._early = []

    def _close(self, end: int, events: list[Piece]) -> None:
        if not self._started:
            raise NotACall(end)
        if not self._kind:
            events.append(self._writer.arguments("{}"))
        elif self._kind not in "{[":
            events.append(self._writer.arguments(_as_object_text("".join(self._early))))


def _as_object_text(text: str) -> str:
    """Arguments that are not an object: some models write JSON inside a string, some write null."""
    value = _loads(text)
    if not value:
        return "{}"
    return value if isinstance(value, str) and isinstance(_loads(value), dict) else text


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
