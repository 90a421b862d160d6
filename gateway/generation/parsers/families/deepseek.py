"""DeepSeek: `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>` … `<｜tool▁call▁end｜>` … `<｜tool▁calls▁end｜>`.

V3 and R1 write a call as `function<｜tool▁sep｜>name` and a JSON code block, V3.1 as `name<｜tool▁sep｜>{…}`.
Kimi-K2 has the same form with names of its own: `functions.name:0<|tool_call_argument_begin|>{…}`.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from llmops.gateway.generation.parsers.json_scanner import InvalidJsonError, JsonScanner
from llmops.gateway.generation.parsers.tool_parser import NotAToolCallError, ToolParser, held_back_length

_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
_FENCE = "```"
_OPEN_FENCE = re.compile(r"```(json)?\s*$")
_MAX_HEADER = 256


class _DeepSeekState(Enum):
    BETWEEN = auto()
    HEADER = auto()
    ARGUMENTS = auto()
    DAMAGED = auto()
    AFTER = auto()


class DeepSeekParser(ToolParser):
    """Both formats. The list's own markers may be missing: models sometimes leave them out."""

    family = "deepseek"
    signs = ("<｜tool▁call▁begin｜>",)
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"
    list_begin, list_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    markers = (list_begin, begin)
    special_tokens = (begin, end, separator, list_begin, list_end)

    def _begin(self, opening: str) -> None:
        self._state = _DeepSeekState.BETWEEN if opening == self.list_begin else _DeepSeekState.HEADER
        self._calls = 0

    def _consume(self) -> bool:
        if self._state in (_DeepSeekState.BETWEEN, _DeepSeekState.AFTER):
            while self._pos < len(self._buffer) and self._buffer[self._pos].isspace():
                self._pos += 1
            if self._pos == len(self._buffer):
                return False
        return {
            _DeepSeekState.BETWEEN: self._between,
            _DeepSeekState.HEADER: self._header,
            _DeepSeekState.ARGUMENTS: self._arguments,
            _DeepSeekState.DAMAGED: self._damaged,
            _DeepSeekState.AFTER: self._after,
        }[self._state]()

    def _tag(self, *tags: str) -> str | None:
        """The tag at the position; "" if there is none, None if more text may still make one."""
        found = next((tag for tag in tags if self._buffer.startswith(tag, self._pos)), None)
        rest = self._buffer[self._pos : self._pos + max(map(len, tags))]
        return found if found else None if any(tag.startswith(rest) for tag in tags) else ""

    def _between(self) -> bool:
        """A call's beginning or the end of the list."""
        tag = self._tag(self.begin, self.list_end)
        if tag is None:
            return False
        if tag == self.begin:
            if self._calls:
                self._new_candidate()
            self._pos, self._state = self._pos + len(tag), _DeepSeekState.HEADER
        elif not self._calls:
            raise NotAToolCallError
        else:
            self._pos += len(tag)
            self._leave()
        return True

    def _header(self) -> bool:
        """Everything up to the brace that opens the arguments."""
        at = self._buffer.find("{", self._pos, self._pos + _MAX_HEADER)
        if at < 0:
            if len(self._buffer) - self._pos < _MAX_HEADER:
                return False
            raise NotAToolCallError
        name = self._name(self._buffer[self._pos : at])
        if not name:
            raise NotAToolCallError
        self._calls += 1
        self._sent([self.writer.start(name)])
        self._value, self._pos, self._state = JsonScanner(), at, _DeepSeekState.ARGUMENTS
        return True

    def _name(self, header: str) -> str | None:
        before, separator, after = header.partition(self.separator)
        found = _NAME.fullmatch((_OPEN_FENCE.sub("", after) if after.strip() else before).strip())
        return found[0] if found and separator else None

    def _arguments(self) -> bool:
        try:
            self._pos, piece, complete = self._value.feed(self._buffer, self._pos)
        except InvalidJsonError as broken:
            piece, complete, self._pos, self._state = broken.text, False, broken.end, _DeepSeekState.DAMAGED
        if piece:
            self._sent([self.writer.arguments(piece)])
        if complete:
            self._state = _DeepSeekState.AFTER
        return self._pos < len(self._buffer)

    def _damaged(self) -> bool:
        """Text that is not JSON is passed on unchanged, up to the end of the call."""
        at = self._buffer.find(self.end, self._pos)
        end = at if at >= 0 else len(self._buffer) - held_back_length(self._buffer[self._pos :], (self.end,))
        if end > self._pos:
            self._sent([self.writer.arguments(self._buffer[self._pos : end])])
        self._pos = end
        if at >= 0:
            self._pos, self._state = at + len(self.end), _DeepSeekState.BETWEEN
        return at >= 0

    def _after(self) -> bool:
        """The end of the code block and of the call."""
        tag = self._tag(_FENCE, self.end)
        if tag is None:
            return False
        if tag != _FENCE:
            self._state = _DeepSeekState.BETWEEN
        self._pos += len(tag)
        return True

    def _finish_call(self) -> None:
        if self._state is _DeepSeekState.DAMAGED:
            self._sent([self.writer.arguments(self._buffer[self._pos :])])
        elif self._state is _DeepSeekState.HEADER or not self._calls:
            raise NotAToolCallError


class KimiParser(DeepSeekParser):
    """Kimi-K2: the id comes with the name, `functions.get_weather:0`."""

    family = "kimi"
    signs = ("<|tool_call_begin|>",)
    begin, end = "<|tool_call_begin|>", "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    list_begin, list_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    markers = (list_begin, begin)
    special_tokens = (begin, end, separator, list_begin, list_end)

    def _name(self, header: str) -> str | None:
        name = super()._name(header)
        return re.sub(r"^functions\.|:\d+$", "", name) if name else None
