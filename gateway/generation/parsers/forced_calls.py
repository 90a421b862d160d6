"""Processors of calls that a grammar enforces: the whole text is one call or a list of calls."""

from __future__ import annotations

from collections.abc import Callable

from llmops.gateway.generation.parsers.json_call import JsonCallParser
from llmops.gateway.generation.parsers.json_scanner import InvalidJsonError, JsonScanner
from llmops.gateway.generation.parsers.output_processor import (
    ContentDelta,
    OutputDelta,
    OutputProcessor,
    ProcessorChain,
)
from llmops.gateway.generation.parsers.tool_parser import CallProcessor, NotAToolCallError, ToolCallBuilder, new_call_id


class NamedCallProcessor(OutputProcessor):
    """The processor for a `tool_choice` that names a function: the text is the call's arguments."""

    def __init__(self, name: str, new_id: Callable[[str], str] = new_call_id) -> None:
        self._name, self._writer, self._value = name, ToolCallBuilder(new_id), JsonScanner()
        self._complete = False

    def name_calls(self, source: str) -> None:
        self._writer.source = source

    def feed(self, text: str) -> list[OutputDelta]:
        if not text or self._complete:
            return []
        deltas: list[OutputDelta] = [] if self._writer.count else [self._writer.start(self._name)]
        try:
            _, piece, self._complete = self._value.feed(text)
        # The grammar excludes this text, so the engine has ignored the grammar.
        except InvalidJsonError:
            piece = text
        return [*deltas, self._writer.arguments(piece)] if piece else deltas


class RequiredCallsProcessor(CallProcessor):
    """The processor for `tool_choice: required`: the text is a JSON list of calls."""

    def __init__(self, new_id: Callable[[str], str] = new_call_id) -> None:
        super().__init__(new_id)
        self._call: JsonCallParser | None = None

    def feed(self, text: str) -> list[OutputDelta]:
        pos, deltas = 0, list[OutputDelta]()
        while pos < len(text):
            if self._call is None or self._call.done:
                pos = self._between(text, pos)
                continue
            try:
                pos, found = self._call.feed(text, pos)
            except NotAToolCallError:
                break
            deltas += found
            if self._call.damaged:
                break
        return deltas

    def _between(self, text: str, pos: int) -> int:
        at = text.find("{", pos)
        if at < 0:
            return len(text)
        self._call = JsonCallParser(self.writer, lambda name: True)
        return at


class AnswerOrCallsProcessor(ProcessorChain):
    """The processor for a grammar of a JSON object or a list of calls.

    The first character determines which of the two the text is.
    """

    def __init__(self, calls: RequiredCallsProcessor) -> None:
        super().__init__([calls])
        self._is_calls: bool | None = None

    def feed(self, text: str) -> list[OutputDelta]:
        if self._is_calls is None:
            text = text.lstrip()
            self._is_calls = text.startswith("[") if text else None
        if self._is_calls:
            return super().feed(text)
        return [ContentDelta(text)] if text else []
