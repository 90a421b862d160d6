"""The tool calls of Hermes, Qwen 2.5, Qwen 3 and SmolLM2.

The format is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once per call.
"""

from __future__ import annotations

from llmops.gateway.generation.parsers.json_call import JsonToolParser
from llmops.gateway.generation.parsers.tool_parser import NotAToolCallError

_CLOSE = "</tool_call>"


class HermesParser(JsonToolParser):
    """The parser of tagged JSON.

    The tag may hold a list of calls (SmolLM2), and its end may be missing.
    """

    family = "hermes"
    signs = ("<tool_call>",)
    rank = 2
    markers = ("<tool_call>",)
    special_tokens = ("<tool_call>", _CLOSE)

    def _consume_damaged(self) -> bool:
        found = self._send_until(_CLOSE)
        if found:
            self._pos += len(_CLOSE)
            self._leave()
        return found

    def _between(self, char: str) -> bool:
        if char.isspace() or char in "[,]" or (char == "}" and self._call):
            self._pos += 1  # a brace too many is a slip that models do make
        elif char == "{":
            self._open_object()
        elif self._buffer.startswith(_CLOSE, self._pos) and self._call:
            self._pos += len(_CLOSE)
            self._leave()
        elif self._call and _CLOSE.startswith(self._buffer[self._pos :]):
            return False
        elif self._call:
            self._leave()
        else:
            raise NotAToolCallError
        return True
