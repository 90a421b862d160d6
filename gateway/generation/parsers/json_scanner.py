"""A scanner that finds the end of a JSON value in text that arrives in pieces.

The scanner reads each character once."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]]")
_CONTROL = re.compile(r"[\x00-\x1f]")
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_CLOSES = {"}": "{", "]": "["}


class InvalidJsonError(ValueError):
    """An error for text that is not JSON.

    Attributes:
        end: The position of the wrong character.
        text: The valid text before the wrong character.
    """

    def __init__(self, end: int, text: str) -> None:
        super().__init__(f"not JSON at {end}")
        self.end, self.text = end, text


def _escape_control(match: re.Match[str]) -> str:
    return _SHORT_ESCAPES.get(match[0], f"\\u{ord(match[0]):04x}")


class JsonScanner:
    """A scanner of one JSON value of any type.

    Models write raw line breaks inside JSON strings, which no client can parse. The scanner escapes
    these control characters and changes nothing else.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = self._escaped = self._scalar = False

    def feed(self, text: str, start: int = 0) -> tuple[int, str, bool]:
        """Consume a part of a JSON value from `text`, starting at `start`.

        Return the position after the consumed text, the consumed text as JSON, and True if the
        value is complete.
        """
        pos = start
        pieces: list[str] = []
        while pos < len(text):
            end, complete = self._advance(text, pos, pieces)
            if complete:
                return end, "".join(pieces), True
            pos = end
        return pos, "".join(pieces), False

    def _advance(self, text: str, pos: int, pieces: list[str]) -> tuple[int, bool]:
        if self._in_string:
            return self._string(text, pos, pieces)
        if self._open:
            return self._container(text, pos, pieces)
        if self._scalar:
            match = _SCALAR_END.search(text, pos)
            end = match.start() if match else len(text)
            pieces.append(text[pos:end])
            return end, match is not None
        return self._begin(text, pos, pieces)

    def _begin(self, text: str, pos: int, pieces: list[str]) -> tuple[int, bool]:
        char = text[pos]
        if char.isspace():
            return pos + 1, False
        if char in "{[":
            self._open.append(char)
        elif char == '"':
            self._in_string = True
        elif char in "-0123456789tfn":
            self._scalar = True
        else:
            raise InvalidJsonError(pos, "".join(pieces))
        pieces.append(char)
        return pos + 1, False

    def _string(self, text: str, pos: int, pieces: list[str]) -> tuple[int, bool]:
        if self._escaped:
            self._escaped = False
            pieces.append(text[pos])
            return pos + 1, False
        match = _IN_STRING.search(text, pos)
        end = match.end() if match else len(text)
        pieces.append(_CONTROL.sub(_escape_control, text[pos:end]))
        if match:
            self._escaped = match[0] == "\\"
            self._in_string = self._escaped
        return end, match is not None and not self._in_string and not self._open

    def _container(self, text: str, pos: int, pieces: list[str]) -> tuple[int, bool]:
        match = _STRUCTURE.search(text, pos)
        if match is None:
            pieces.append(text[pos:])
            return len(text), False
        char = match[0]
        if char in _CLOSES and self._open[-1] != _CLOSES[char]:
            raise InvalidJsonError(match.start(), "".join(pieces) + text[pos : match.start()])
        pieces.append(text[pos : match.end()])
        if char in _CLOSES:
            self._open.pop()
        elif char == '"':
            self._in_string = True
        else:
            self._open.append(char)
        return match.end(), not self._open and not self._in_string
