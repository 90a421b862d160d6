"""The tool calls of Hermes, Qwen 2.5, Qwen 3 and SmolLM2.

The format is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once per call.
"""

from __future__ import annotations

from llmops.gateway.generation.parsers.json_call import JsonCallParser
from llmops.gateway.generation.parsers.tool_parser import NotAToolCallError, ToolParser

_CLOSE = "</tool_call>"


class HermesParser(ToolParser):
    """The parser of tagged JSON.

    The tag may hold a list of calls (SmolLM2), and its end may be missing.
    """

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
            found = self._send_until(_CLOSE)
            if found:
                self._pos += len(_CLOSE)
                self._leave()
            return found
        self._pos, deltas = call.feed(self._buffer, self._pos)
        self._send(deltas)
        return self._pos < len(self._buffer)

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
            self._send_arguments(self._buffer[self._pos :])
        elif not self._call.done:
            self._send(self._call.end())
