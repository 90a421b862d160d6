"""Tool calls with a tag for each argument: Qwen3-Coder and related models, GLM-4.5 and later.

Qwen3-Coder: `<tool_call>`, `<function=name>`, `<parameter=key>` value `</parameter>` …,
`</function>`, `</tool_call>`. GLM: `<tool_call>name`, `<arg_key>key</arg_key>`,
`<arg_value>value</arg_value>` …, `</tool_call>`.

Values are bare text, and the function's schema determines their types. Strings are sent as they
arrive, other values when they are complete.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from enum import Enum, auto

from llmops.gateway.generation.parsers.argument_types import JsonTypes, parameter_types, to_argument_json
from llmops.gateway.generation.parsers.tool_parser import (
    NO_FUNCTIONS,
    Functions,
    NotAToolCallError,
    ToolParser,
    held_back_length,
)

_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
_GLM_HEAD = re.compile(r"([A-Za-z0-9_.:\-]{1,128})(\s{0,65})")
_GLM_KEY = re.compile(r"([^<]{0,256})</arg_key>\s{0,16}<arg_value>")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MAX_KEY = 256


class _TaggedState(Enum):
    HEAD = auto()
    BETWEEN = auto()
    VALUE = auto()
    TAIL = auto()


class TaggedCallParser(ToolParser):
    """The base of the parsers of calls that have a head, tagged arguments and a tail.

    A call whose head does not match the format is passed as text.
    """

    markers: tuple[str, ...] = (_OPEN,)

    #: `value_end` is the tag that ends a value; `value_stops` are tags that end a value if the
    #: model forgot `value_end`.
    value_end: str
    value_stops: tuple[str, ...]

    #: True if line breaks next to the tags belong to the format and not to the value.
    framed = False

    #: True if a value whose type the schema does not define is a string.
    untyped_is_text = False

    def __init__(self, tools: Functions = NO_FUNCTIONS) -> None:
        super().__init__(tools)
        self._known_types: dict[int, JsonTypes] = {}

    def _begin(self, opening: str) -> None:
        self._state = _TaggedState.HEAD
        self._arguments_sent = 0

    def _consume(self) -> bool:
        if self._state is _TaggedState.VALUE:
            return self._value()
        if not self._skip_space():
            return False
        return {_TaggedState.HEAD: self._head, _TaggedState.BETWEEN: self._between, _TaggedState.TAIL: self._tail}[
            self._state
        ]()

    @abstractmethod
    def _head(self) -> bool:
        """Consume the function's name, and call `_start` to begin the call.

        Raise NotAToolCallError if the text is not a call.
        """

    @abstractmethod
    def _between(self) -> bool:
        """Consume the key of an argument, or the end of the call.

        Subclasses call `_key` for a key, and `_end_arguments` at the end of the call.
        """

    @abstractmethod
    def _tail(self) -> bool:
        """Consume the end of the call after its arguments."""

    # -- for subclasses

    def _start(self, name: str, end: int) -> bool:
        self._name = name
        self._send([self.writer.start(name)])
        self._send_arguments("{")
        self._pos, self._state = end, _TaggedState.BETWEEN
        return True

    def _key(self, key: str, end: int) -> bool:
        comma = ", " if self._arguments_sent else ""
        self._arguments_sent += 1
        kinds = parameter_types(self.tools.get(self._name), key, self._known_types)
        self._kinds: JsonTypes = frozenset({"string"}) if kinds is None and self.untyped_is_text else kinds
        self._is_text, self._parts, self._fresh = self._kinds == frozenset({"string"}), list[str](), True
        opening = '"' if self._is_text else ""
        self._send_arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {opening}")
        self._pos, self._state = end, _TaggedState.VALUE
        return True

    def _end_arguments(self, end: int) -> bool:
        self._send_arguments("}")
        self._pos, self._state = end, _TaggedState.TAIL
        self._arguments_sent = 0
        return True

    # -- values

    def _value(self) -> bool:
        if self._fresh and self.framed:
            self._pos += self._buffer[self._pos] == "\n"
        self._fresh = False
        tags = (self.value_end, *self.value_stops)
        found = min(((at, tag) for tag in tags if (at := self._buffer.find(tag, self._pos)) >= 0), default=None)
        if found is None:
            rest = self._buffer[self._pos :]
            keep = held_back_length(rest, tags)
            keep += self.framed and rest[: len(rest) - keep].endswith("\n")
            self._more(rest[: len(rest) - keep])
            self._pos = len(self._buffer) - keep
            return False
        at, tag = found
        text = self._buffer[self._pos : at]
        self._more(text.removesuffix("\n") if self.framed else text)
        self._send(
            [self.writer.arguments('"' if self._is_text else to_argument_json("".join(self._parts), self._kinds))]
        )
        self._pos = at + (len(tag) if tag == self.value_end else 0)
        self._state = _TaggedState.BETWEEN
        return True

    def _more(self, text: str) -> None:
        if self._is_text:
            self._send_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._parts.append(text)

    def _finish_call(self) -> None:
        if self._state is _TaggedState.HEAD:
            raise NotAToolCallError
        if self._state is _TaggedState.VALUE:
            # The call is cut off: send its text unchanged, so that the arguments do not look
            # complete.
            self._more(self._buffer[self._pos :])
        elif self._state is _TaggedState.BETWEEN:
            self._send_arguments("}")


class QwenCoderParser(TaggedCallParser):
    """The parser of Qwen3-Coder.

    Without `<tool_call>`, which the model sometimes forgets, a call must name an offered tool.
    """

    family = "qwen_coder"
    signs = ("<function=",)
    rank = 1
    markers = (_OPEN, "<function=")
    special_tokens = (_OPEN, _CLOSE)
    value_end = "</parameter>"
    value_stops = ("<parameter=", "</function>", _CLOSE)
    framed = True
    untyped_is_text = True

    def _begin(self, opening: str) -> None:
        super()._begin(opening)
        self._bare = opening != _OPEN
        self._named = self._bare

    def _head(self) -> bool:
        if not self._named:
            tag = self._tag_at_position("<function=")
            if tag is None:
                return False
            if not tag:
                raise NotAToolCallError
            self._pos += len(tag)
            self._named = True
            return self._pos < len(self._buffer)
        name = _NAME.match(self._buffer, self._pos)
        end = name.end() if name else self._pos
        if end == len(self._buffer) and end - self._pos < 128:
            return False
        if not name or self._buffer[end] != ">" or (self._bare and name[0] not in self.tools):
            raise NotAToolCallError
        return self._start(name[0], end + 1)

    def _between(self) -> bool:
        tag = self._tag_at_position("<parameter=", "</function>", _CLOSE)
        if tag is None:
            return False
        if tag == "<parameter=":
            at = self._buffer.find(">", self._pos)
            if at < 0 and len(self._buffer) - self._pos < _MAX_KEY:
                return False
            if 0 <= at - self._pos < _MAX_KEY:
                return self._key(self._buffer[self._pos + len(tag) : at].strip(), at + 1)
        return self._end_arguments(self._pos + (len(tag) if tag == "</function>" else 0))

    def _tail(self) -> bool:
        tag = self._tag_at_position(_CLOSE, "<function=")
        if tag is None:
            return False
        if tag == "<function=":
            self._new_candidate()
            self._state, self._named = _TaggedState.HEAD, False
            return True
        self._pos += len(tag)
        self._leave()
        return True


class GlmParser(TaggedCallParser):
    """The parser of GLM.

    Versions 4.5 and 4.6 write each tag on its own line; versions since 4.7 do not.
    """

    family = "glm"
    signs = ("<arg_key>",)
    rank = 1
    special_tokens = (_OPEN, _CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    value_end = "</arg_value>"
    value_stops = ("<arg_key>", _CLOSE)

    def _head(self) -> bool:
        found = _GLM_HEAD.match(self._buffer, self._pos)
        if found is None or len(found[2]) > 64:
            raise NotAToolCallError
        after = self._buffer[found.end() : found.end() + len(_CLOSE)]
        if any(after.startswith(tag) for tag in ("<arg_key>", _CLOSE)):
            return self._start(found[1], found.end())
        if not any(tag.startswith(after) for tag in ("<arg_key>", _CLOSE)):
            raise NotAToolCallError
        return False

    def _between(self) -> bool:
        tag = self._tag_at_position("<arg_key>", _CLOSE)
        if tag is None:
            return False
        if tag == "<arg_key>":
            return self._arg_key(self._pos + len(tag))
        return self._end_arguments(self._pos)

    def _arg_key(self, start: int) -> bool:
        """Consume the key at offset `start`, and the tag before its value.

        Any other text ends the call.
        """
        middle = _GLM_KEY.match(self._buffer, start)
        if middle:
            return self._key(middle[1].strip(), middle.end())
        if _may_become_value(self._buffer[start : start + 320]):
            return False
        return self._end_arguments(self._pos)

    def _tail(self) -> bool:
        tag = self._tag_at_position(_CLOSE)
        if tag is None:
            return False
        self._pos += len(tag)
        self._leave()
        return True


def _may_become_value(text: str) -> bool:
    """Return True if more text could complete `text` to `key</arg_key> <arg_value>`."""
    key, less, rest = text.partition("<")
    if not less:
        return len(key) <= _MAX_KEY
    tag = "/arg_key>"
    if not rest.startswith(tag):
        return tag.startswith(rest)
    rest = rest[len(tag) :]
    bare = rest.lstrip()
    return len(rest) - len(bare) <= 16 and "<arg_value>".startswith(bare)
