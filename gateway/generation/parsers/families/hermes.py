"""The tool calls of Hermes, Qwen 2.5, Qwen 3 and SmolLM2.

The format of each call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

from __future__ import annotations

from llmops.gateway.generation.parsers.json_call import JsonToolParser
from llmops.gateway.generation.parsers.tool_parser import NotAToolCallError

_CLOSE = "</tool_call>"


class HermesParser(JsonToolParser):
    """The parser of calls as JSON between tags.

    The tags may enclose a list of calls (SmolLM2), and the end tag may be missing.
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
            self._pos += 1  # Ignore an additional closing brace, a mistake that models make.
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
