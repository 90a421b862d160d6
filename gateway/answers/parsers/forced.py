"""Calls that a grammar has forced: the whole text is the call, or the list of calls, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from llmops.gateway.answers.parsers.base import CallWriter, NotACall, new_call_id
from llmops.gateway.answers.parsers.json_call import CallObject
from llmops.gateway.answers.parsers.json_text import BrokenJson, JsonValue
from llmops.gateway.answers.parsers.pieces import Piece, Processor, Text


class NamedCall(Processor):
    """`tool_choice` names the function: the text is its arguments. The name is sent with the first text."""

    def __init__(self, name: str, new_id: Callable[[], str] = new_call_id) -> None:
        self._name, self._writer, self._value = name, CallWriter(new_id), JsonValue()
        self._complete = False

    def feed(self, text: str) -> list[Piece]:
        if not text or self._complete:
            return []
        events: list[Piece] = [] if self._writer.count else [self._writer.start(self._name)]
        try:
            _, piece, self._complete = self._value.feed(text)
        except BrokenJson:  # only an engine without the grammar could do this
            piece = text
        return [*events, self._writer.arguments(piece)] if piece else events

    def finish(self) -> list[Piece]:
        return []


class ForcedCalls(Processor):
    """`tool_choice: required`: the text is a JSON list of calls."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._writer = CallWriter(new_id)
        self._call: CallObject | None = None

    def feed(self, text: str) -> list[Piece]:
        pos, events = 0, list[Piece]()
        while pos < len(text):
            if self._call is None or self._call.done:
                pos = self._between(text, pos)
                continue
            try:
                pos, found = self._call.feed(text, pos)
            except NotACall:
                break
            events += found
            if self._call.damaged:
                break
        return events

    def finish(self) -> list[Piece]:
        return []

    @property
    def made_tool_calls(self) -> bool:
        return self._writer.count > 0

    def _between(self, text: str, pos: int) -> int:
        at = text.find("{", pos)
        if at < 0:
            return len(text)
        self._call = CallObject(self._writer, lambda name: True)
        return at


class AnswerOrCalls(Processor):
    """Under a grammar that allows a JSON object or a list of calls: the first character says which."""

    def __init__(self, calls: ForcedCalls) -> None:
        self._calls: Processor = calls
        self._is_calls: bool | None = None

    def feed(self, text: str) -> list[Piece]:
        if self._is_calls is None:
            text = text.lstrip()
            self._is_calls = text.startswith("[") if text else None
        if self._is_calls:
            return list(self._calls.feed(text))
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return list(self._calls.finish())

    @property
    def made_tool_calls(self) -> bool:
        return self._calls.made_tool_calls
