"""The tool calls of Mistral's models.

The format is `[TOOL_CALLS] [{"name": …, "arguments": {…}}]` up to tokenizer v7, and
`[TOOL_CALLS]name[ARGS]{…}` since v11.
"""

from __future__ import annotations

import re

from llmops.gateway.generation.parsers.json_call import JsonToolParser
from llmops.gateway.generation.parsers.json_scanner import JsonScanner
from llmops.gateway.generation.parsers.tool_parser import NotAToolCallError, new_mistral_call_id

_OPEN, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


class MistralParser(JsonToolParser):
    """The parser of Mistral's format before v11 and of the format since v11.

    Since v11, each call has its own marker and may have `[CALL_ID]id` before its arguments.
    """

    family = "mistral"
    signs = (_OPEN,)
    markers = (_OPEN,)
    special_tokens = (_OPEN, _ID, _ARGS)
    new_id = staticmethod(new_mistral_call_id)

    def _begin(self, opening: str) -> None:
        super()._begin(opening)
        self._value: JsonScanner | None = None
        self._list = self._is_damaged = False

    def _consume(self) -> bool:
        if self._value is None:
            return super()._consume()
        return self._consume_damaged() if self._is_damaged else self._consume_value(self._value)

    def _between(self, char: str) -> bool:
        if char.isspace() or (char == "," and self._call):
            self._pos += 1
        elif char == "[" and not self._list and not self._call and not self._buffer.startswith("[T", self._pos):
            if len(self._buffer) - self._pos < 2:
                return False
            self._list, self._pos = True, self._pos + 1
        elif char == "{":
            self._open_object()
        elif self._call:
            self._pos += char == "]" and self._list
            self._leave()
        else:
            return self._header()
        return True

    def _header(self) -> bool:
        """Consume the header of a call up to the brace that opens its arguments.

        A header is `name`, `name[ARGS]` or `name[CALL_ID]id[ARGS]`.
        """
        name = _NAME.match(self._buffer, self._pos)
        if name is None:
            raise NotAToolCallError
        call_id, at = None, name.end()
        if self._buffer.startswith(_ID, at):
            found = _NAME.match(self._buffer, at + len(_ID))
            call_id, at = (found[0], found.end()) if found else (None, at + len(_ID))
        at += len(_ARGS) if self._buffer.startswith(_ARGS, at) else 0
        while at < len(self._buffer) and self._buffer[at].isspace():
            at += 1
        if at < len(self._buffer) and self._buffer[at] == "{":
            self._send([self.writer.start(name[0], call_id)])
            self._value, self._pos = JsonScanner(), at
            return True
        if not self._header_may_grow(at):
            raise NotAToolCallError
        return False

    def _header_may_grow(self, at: int) -> bool:
        tail = self._buffer[at:]
        return len(self._buffer) - self._pos < 512 and any(mark.startswith(tail) for mark in (_ID, _ARGS))

    def _consume_value(self, value: JsonScanner) -> bool:
        is_complete, self._is_damaged = self._send_value(value)
        if is_complete:
            self._leave()
        return self._pos < len(self._buffer)

    def _consume_damaged(self) -> bool:
        """Send damaged arguments as they are, up to the next call or the end of the text."""
        found = self._send_until(_OPEN)
        if found:
            self._leave()
        return found

    def _finish_call(self) -> None:
        if self._value is None:
            super()._finish_call()
        elif self._is_damaged:
            self._send_arguments(self._buffer[self._pos :])
