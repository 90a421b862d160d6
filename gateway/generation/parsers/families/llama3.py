"""The tool calls of Llama 3.1 to 3.3.

The format is `{"name": …, "parameters": {…}}`, alone or after `<|python_tag|>`. Several calls are
separated by `;`.
"""

from __future__ import annotations

import re

from llmops.gateway.generation.parsers.json_call import JsonToolParser
from llmops.gateway.generation.parsers.tool_parser import NotAToolCallError, held_back_length

_TAG = "<|python_tag|>"
_OPENING = re.compile(r"<\|python_tag\|>|\[\s*(?=\{)|\{")
_HALF_LIST = re.compile(r"\[\s{0,16}$")


class Llama3Parser(JsonToolParser):
    """The parser of Llama 3.

    A call without a marker must name an offered tool and have arguments.
    """

    family = "llama3"
    signs = ('"parameters": dictionary of argument name', _TAG)
    rank = 4
    special_tokens = (_TAG,)
    unmarked = True

    def _find_opening(self, text: str, start: int) -> tuple[int, int] | None:
        match = _OPENING.search(text, start)
        if match is None:
            return None
        # The opening brace of a call without a marker belongs to the object itself.
        return match.start(), match.end() - (match[0] == "{")

    def _held(self, text: str) -> int:
        half = _HALF_LIST.search(text)
        return len(text) - half.start() if half else held_back_length(text, (_TAG,))

    def _begin(self, opening: str) -> None:
        super()._begin(opening)
        self._tag, self._list = opening == _TAG, opening.startswith("[")

    def _between(self, char: str) -> bool:
        if char == "{":
            self._open_object()
        elif char.isspace() or (self._call and char in (",;]" if self._list else ";")):
            self._pos += 1
            self._list = self._list and char != "]"
        elif self._call:
            self._leave()
        elif self._tag:
            # A call of the built-in code interpreter: its code is the answer, and the marker is
            # dropped.
            self._raw.clear()
            raise NotAToolCallError
        else:
            raise NotAToolCallError
        return True
