"""The tool calls of DeepSeek and Kimi-K2.

The format is `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>` … `<｜tool▁call▁end｜>` …
`<｜tool▁calls▁end｜>`.

V3 and R1 write a call as `function<｜tool▁sep｜>name` and a JSON code block; V3.1 writes a call as
`name<｜tool▁sep｜>{…}`. Kimi-K2 uses the same form with other markers:
`functions.name:0<|tool_call_argument_begin|>{…}`.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from llmops.gateway.generation.parsers.json_scanner import JsonScanner
from llmops.gateway.generation.parsers.tool_parser import NotAToolCallError, ToolParser

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
    """The parser of the formats of DeepSeek V3 and R1, and of DeepSeek V3.1.

    The markers around the list of calls may be missing, because models sometimes leave them out.
    """

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
        if self._state in (_DeepSeekState.BETWEEN, _DeepSeekState.AFTER) and not self._skip_space():
            return False
        return {
            _DeepSeekState.BETWEEN: self._between,
            _DeepSeekState.HEADER: self._header,
            _DeepSeekState.ARGUMENTS: self._arguments,
            _DeepSeekState.DAMAGED: self._damaged,
            _DeepSeekState.AFTER: self._after,
        }[self._state]()

    def _between(self) -> bool:
        """Consume the beginning of the next call or the end of the list."""
        tag = self._tag_at_position(self.begin, self.list_end)
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
        """Consume everything up to the brace that opens the arguments."""
        at = self._buffer.find("{", self._pos, self._pos + _MAX_HEADER)
        if at < 0:
            if len(self._buffer) - self._pos < _MAX_HEADER:
                return False
            raise NotAToolCallError
        name = self._name(self._buffer[self._pos : at])
        if not name:
            raise NotAToolCallError
        self._calls += 1
        self._send([self.writer.start(name)])
        self._value, self._pos, self._state = JsonScanner(), at, _DeepSeekState.ARGUMENTS
        return True

    def _name(self, header: str) -> str | None:
        before, separator, after = header.partition(self.separator)
        found = _NAME.fullmatch((_OPEN_FENCE.sub("", after) if after.strip() else before).strip())
        return found[0] if found and separator else None

    def _arguments(self) -> bool:
        is_complete, is_damaged = self._send_value(self._value)
        if is_complete or is_damaged:
            self._state = _DeepSeekState.AFTER if is_complete else _DeepSeekState.DAMAGED
        return self._pos < len(self._buffer)

    def _damaged(self) -> bool:
        """Send arguments that are not JSON unchanged, up to the end of the call."""
        found = self._send_until(self.end)
        if found:
            self._pos, self._state = self._pos + len(self.end), _DeepSeekState.BETWEEN
        return found

    def _after(self) -> bool:
        """Consume the end of the code block and of the call."""
        tag = self._tag_at_position(_FENCE, self.end)
        if tag is None:
            return False
        if tag != _FENCE:
            self._state = _DeepSeekState.BETWEEN
        self._pos += len(tag)
        return True

    def _finish_call(self) -> None:
        if self._state is _DeepSeekState.DAMAGED:
            self._send_arguments(self._buffer[self._pos :])
        elif self._state is _DeepSeekState.HEADER or not self._calls:
            raise NotAToolCallError


class KimiParser(DeepSeekParser):
    """The parser of Kimi-K2, which writes the id together with the name: `functions.get_weather:0`."""

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
