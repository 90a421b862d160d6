"""The tool calls of Llama 3.1 to 3.3.

The format is `{"name": …, "parameters": {…}}`, bare or after `<|python_tag|>`. Several calls have
`;` between them.
"""

from __future__ import annotations

import re

from llmops.gateway.generation.parsers.json_call import JsonCallParser
from llmops.gateway.generation.parsers.tool_parser import NotAToolCallError, ToolParser, held_back_length

_TAG = "<|python_tag|>"
_OPENING = re.compile(r"<\|python_tag\|>|\[\s*(?=\{)|\{")
_HALF_LIST = re.compile(r"\[\s{0,16}$")


class Llama3Parser(ToolParser):
    """The parser of Llama 3.

    A bare call has no marker, so it must name a tool on offer and have arguments.
    """

    family = "llama3"
    signs = ('"parameters": dictionary of argument name', _TAG)
    rank = 4
    special_tokens = (_TAG,)

    def _find_opening(self, text: str, start: int) -> tuple[int, int] | None:
        match = _OPENING.search(text, start)
        if match is None:
            return None
        # a bare brace belongs to the object itself
        return match.start(), match.end() - (match[0] == "{")

    def _held(self, text: str) -> int:
        half = _HALF_LIST.search(text)
        return len(text) - half.start() if half else held_back_length(text, (_TAG,))

    def _begin(self, opening: str) -> None:
        self._call: JsonCallParser | None = None
        self._tag, self._list = opening == _TAG, opening.startswith("[")

    def _consume(self) -> bool:
        if self._call is not None and not self._call.done:
            return self._consume_call(self._call)
        return self._between(self._buffer[self._pos])

    def _consume_call(self, call: JsonCallParser) -> bool:
        if call.damaged:
            self._send_arguments(self._buffer[self._pos :])
            self._pos = len(self._buffer)
            return False
        self._pos, deltas = call.feed(self._buffer, self._pos)
        self._send(deltas)
        return self._pos < len(self._buffer)

    def _between(self, char: str) -> bool:
        if char == "{":
            if self._call:
                self._new_candidate()
            self._call = JsonCallParser(self.writer, self.tools.__contains__, unmarked=True)
        elif char.isspace() or (self._call and char in (",;]" if self._list else ";")):
            self._pos += 1
            self._list = self._list and char != "]"
        elif self._call:
            self._leave()
        elif self._tag:
            # the built-in code interpreter: its code is the answer, the marker is not
            self._raw.clear()
            raise NotAToolCallError
        else:
            raise NotAToolCallError
        return True

    def _finish_call(self) -> None:
        if self._call is None:
            raise NotAToolCallError
        if not self._call.done and not self._call.damaged:
            self._send(self._call.end())
