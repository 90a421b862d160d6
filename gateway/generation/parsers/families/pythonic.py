"""The tool calls of Llama 4, Llama 3.2 (pythonic templates) and LFM2.

The format is `[get_weather(city="Paris"), now()]`, alone or between markers.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from llmops.gateway.generation.parsers.argument_types import parse_literal
from llmops.gateway.generation.parsers.tool_parser import NotAToolCallError, ToolParser, held_back_length

_MARKS = ("<|python_start|>", "<|tool_call_start|>")
_ENDS = ("<|python_end|>", "<|tool_call_end|>")
_OPENING = re.compile(r"<\|python_start\|>|<\|tool_call_start\|>|\[(?=\s{0,16}[A-Za-z_][\w.\-]{0,127}\()")
_HALF_CALL = re.compile(r"\[\s{0,16}(?:[A-Za-z_][\w.\-]{0,127})?$")
_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,127}")
_ARGUMENT = re.compile(r"([A-Za-z_]\w{0,127})\s{0,16}(=?)")
_IN_STRING = {"'": re.compile(r"'|\\"), '"': re.compile(r'"|\\')}
_VALUE_STEP = re.compile(r"""["'()\[\]{},\\]""")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_CLOSES = {")": "(", "]": "[", "}": "{"}


class _PythonicState(Enum):
    LIST = auto()
    NAME = auto()
    ARGUMENT = auto()
    VALUE = auto()
    STRING = auto()
    OTHER = auto()
    COMMA = auto()
    NEXT = auto()


class PythonicParser(ToolParser):
    """The parser of calls in Python's syntax.

    Arguments become JSON. Strings are sent piece by piece, other literals when they are complete. A
    list without markers must start with an offered tool. A value that is not a Python literal
    becomes a string.
    """

    family = "pythonic"
    signs = ("<|python_start|>", "<|tool_call_start|>", "[func_name1(", "[func_name(")
    rank = 3
    special_tokens = (*_MARKS, *_ENDS)

    def _find_opening(self, text: str, start: int) -> tuple[int, int] | None:
        match = _OPENING.search(text, start)
        return (match.start(), match.end()) if match else None

    def _held(self, text: str) -> int:
        half = _HALF_CALL.search(text)
        return len(text) - half.start() if half else held_back_length(text, _MARKS)

    def _begin(self, opening: str) -> None:
        self._marked = opening in _MARKS
        self._state = _PythonicState.LIST if self._marked else _PythonicState.NAME
        self._first = True  # True as long as no argument of this call was sent.
        self._calls = 0

    def _consume(self) -> bool:
        return {
            _PythonicState.LIST: self._list,
            _PythonicState.NAME: self._name,
            _PythonicState.ARGUMENT: self._argument,
            _PythonicState.VALUE: self._value,
            _PythonicState.STRING: self._string,
            _PythonicState.OTHER: self._other,
            _PythonicState.COMMA: self._comma,
            _PythonicState.NEXT: self._next,
        }[self._state]()

    def _list(self) -> bool:
        if not self._skip_space():
            return False
        self._pos += self._buffer[self._pos] == "["
        self._state = _PythonicState.NAME
        return True

    def _name(self) -> bool:
        if not self._skip_space():
            return False
        match = _NAME.match(self._buffer, self._pos)
        end = match.end() if match else self._pos
        if match and end == len(self._buffer):
            return False
        if not match or self._buffer[end] != "(" or not (self._marked or match[0] in self.tools):
            return self._end_list_or_reject()
        self._send([self.writer.start(match[0])])
        self._send_arguments("{")
        self._calls, self._first, self._pos, self._state = self._calls + 1, True, end + 1, _PythonicState.ARGUMENT
        return True

    def _end_list_or_reject(self) -> bool:
        if not self._calls:
            raise NotAToolCallError
        self._leave()
        return True

    def _argument(self) -> bool:
        """Consume `name=`, or the end of the call."""
        if not self._skip_space():
            return False
        if self._buffer[self._pos] == ")":
            self._send_arguments("}")
            self._pos, self._state = self._pos + 1, _PythonicState.NEXT
            return True
        match = _ARGUMENT.match(self._buffer, self._pos)
        if match and not match[2] and match.end() == len(self._buffer):
            return False
        if not match or not match[2]:
            return self._skip_unnamed_argument()
        self._send_arguments(("" if self._first else ", ") + json.dumps(match[1]) + ": ")
        self._first, self._pos, self._state = False, match.end(), _PythonicState.VALUE
        return True

    def _skip_unnamed_argument(self) -> bool:
        """Skip an argument without a name, up to the next comma or the end."""
        self._literal: list[str] = []
        self._open: list[str] = []
        self._quote, self._escaped, self._mute, self._state = "", False, True, _PythonicState.OTHER
        return True

    def _value(self) -> bool:
        if not self._skip_space():
            return False
        char = self._buffer[self._pos]
        if char in "\"'":
            return self._open_string(char)
        self._skip_unnamed_argument()
        self._mute = False
        return True

    def _open_string(self, quote: str) -> bool:
        ahead = self._buffer[self._pos : self._pos + 3]
        if ahead in (quote, quote * 2):
            # Either an empty string or the start of a triple quote: the next character determines
            # which.
            return False
        self._quote = quote * 3 if ahead == quote * 3 else quote
        self._pos += len(self._quote)
        self._send_arguments('"')
        self._state = _PythonicState.STRING
        return True

    def _string(self) -> bool:
        quote, text, start = self._quote, self._buffer, self._pos
        match = _IN_STRING[quote[0]].search(text, start)
        end = match.start() if match else len(text)
        if end > start:
            self._send_arguments(json.dumps(text[start:end], ensure_ascii=False)[1:-1])
            self._pos = end
        if match is None:
            return False
        return self._escape() if match[0] == "\\" else self._close_string(quote)

    def _close_string(self, quote: str) -> bool:
        ahead = self._buffer[self._pos : self._pos + len(quote)]
        if len(ahead) < len(quote) and quote.startswith(ahead):
            return False
        if ahead == quote:
            self._send_arguments('"')
            self._pos, self._state = self._pos + len(quote), _PythonicState.COMMA
        else:
            self._send_arguments(json.dumps(ahead[0])[1:-1])
            self._pos += 1
        return True

    def _escape(self) -> bool:
        if self._pos + 1 >= len(self._buffer):
            return False
        kind = self._buffer[self._pos + 1]
        size = _HEX_ESCAPES.get(kind, 0)
        digits = self._buffer[self._pos + 2 : self._pos + 2 + size]
        if len(digits) < size and all(c in "0123456789abcdefABCDEF" for c in digits):
            return False
        self._send_arguments(json.dumps(_unescape(kind, digits))[1:-1])
        self._pos += 2 + (size if _is_hex(digits, size) else 0)
        return True

    def _other(self) -> bool:
        """Collect a part of a literal other than a plain string, up to a quote, comma or bracket."""
        match = _VALUE_STEP.search(self._buffer, self._pos)
        end = match.start() if match else len(self._buffer)
        self._literal.append(self._buffer[self._pos : end])
        self._escaped = self._escaped and end == self._pos
        self._pos = end
        return match is not None and self._literal_step(match[0])

    def _literal_step(self, char: str) -> bool:
        if not self._quote and not self._open and char in "),]}":
            self._end_literal()
            return True
        if self._quote:
            was_escaped, self._escaped = self._escaped, char == "\\" and not self._escaped
            self._quote = "" if char == self._quote and not was_escaped else self._quote
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._open.append(char)
        elif char in _CLOSES and self._open[-1] == _CLOSES[char]:
            self._open.pop()
        self._literal.append(char)
        self._pos += 1
        return True

    def _end_literal(self) -> None:
        if not self._mute:
            self._send_arguments(_to_json("".join(self._literal).strip()))
        self._state = _PythonicState.COMMA

    def _comma(self) -> bool:
        if not self._skip_space():
            return False
        char = self._buffer[self._pos]
        if char in ",]}":
            self._pos += 1
        elif char != ")":
            return self._skip_unnamed_argument()
        self._state = _PythonicState.ARGUMENT
        return True

    def _next(self) -> bool:
        """Consume a comma before the next call, or the end of the list and its marker."""
        if not self._skip_space():
            return False
        rest = self._buffer[self._pos : self._pos + 24]
        end = next((mark for mark in _ENDS if rest.startswith(mark)), None)
        if rest[0] == ",":
            self._pos, self._state = self._pos + 1, _PythonicState.NAME
        elif rest[0] == "]" and not self._marked:
            self._pos += 1
            self._leave()
        elif rest[0] == "]":
            self._pos += 1
        elif end:
            self._pos += len(end)
            self._leave()
        elif self._marked and any(mark.startswith(rest) for mark in _ENDS):
            return False
        else:
            self._leave()
        return True

    def _finish_call(self) -> None:
        if not self._calls:
            raise NotAToolCallError
        if self._state is _PythonicState.OTHER and not self._mute:
            self._send_arguments(_to_json("".join(self._literal).strip()))


def _is_hex(digits: str, size: int) -> bool:
    return 0 < size == len(digits) and all(c in "0123456789abcdefABCDEF" for c in digits)


def _unescape(kind: str, digits: str) -> str:
    """Return the text of a Python escape sequence.

    An unknown escape sequence stays unchanged, as in Python.
    """
    if kind in _HEX_ESCAPES:
        code = int(digits, 16) if _is_hex(digits, _HEX_ESCAPES[kind]) else -1
        return chr(code) if 0 <= code < 0x110000 else "\\" + kind
    if kind == "\n":
        return ""
    return _ESCAPES.get(kind) or (kind if kind in "\\'\"" else "\\" + kind)


def _to_json(source: str) -> str:
    try:
        return json.dumps(parse_literal(source), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        return json.dumps(source, ensure_ascii=False)
