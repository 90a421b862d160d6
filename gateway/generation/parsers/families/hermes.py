"""Hermes, Qwen 2.5, Qwen 3, SmolLM2: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once per call."""

from __future__ import annotations

from llmops.gateway.generation.parsers.json_call import JsonCallParser
from llmops.gateway.generation.parsers.tool_parser import NotAToolCallError, ToolParser, held_back_length

_CLOSE = "</tool_call>"


class HermesParser(ToolParser):
    """The tag may also hold a list of calls (SmolLM2). A missing closing tag ends with the text."""

    family = "hermes"
    signs = ("<tool_call>",)
    rank = 2
    markers = ("<tool_call>",)
    special_tokens = ("<tool_call>", _CLOSE)

    def _begin(self, opening: str) -> None:
        self._call: JsonCallParser | None = None
        self._calls = 0

    def _consume(self) -> bool:
        if self._call is not None and not self._call.done:
            return self._consume_call(self._call)
        return self._between()

    def _consume_call(self, call: JsonCallParser) -> bool:
        if call.damaged:
            return self._consume_damaged(call)
        self._pos, events = call.feed(self._buffer, self._pos)
        self._sent(events)
        return self._pos < len(self._buffer)

    def _consume_damaged(self, call: JsonCallParser) -> bool:
        at = self._buffer.find(_CLOSE, self._pos)
        end = at if at >= 0 else len(self._buffer) - held_back_length(self._buffer[self._pos :], (_CLOSE,))
        self._sent(call.damage(self._buffer[self._pos : end]))
        self._pos = end
        if at >= 0:
            self._pos += len(_CLOSE)
            self._leave()
        return at >= 0

    def _between(self) -> bool:
        char = self._buffer[self._pos]
        if char.isspace() or char in "[,]" or (char == "}" and self._calls):
            self._pos += 1  # a brace too many is a slip that models do make
        elif char == "{":
            if self._call:
                self._new_candidate()
            self._call = JsonCallParser(self.writer, lambda name: True)
            self._calls += 1
        elif self._buffer.startswith(_CLOSE, self._pos) and self._calls:
            self._pos += len(_CLOSE)
            self._leave()
        elif self._calls and _CLOSE.startswith(self._buffer[self._pos :]):
            return False
        elif self._calls:
            self._leave()
        else:
            raise NotAToolCallError
        return True

    def _finish_call(self) -> None:
        if self._call is None:
            raise NotAToolCallError
        if self._call.damaged:
            self._sent(self._call.damage(self._buffer[self._pos :]))
        elif not self._call.done:
            self._sent(self._call.end())
