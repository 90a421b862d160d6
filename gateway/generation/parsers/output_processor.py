"""The parts of an answer, and the processors that find them in a choice's text.

The parts are content, thinking and tool calls.

A choice's text runs through a chain of processors, reasoning first, then tools. Each one turns text
into deltas, and the next one in the chain sees only the ContentDelta among them. State is per
choice; `feed` gets text split anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class ContentDelta(NamedTuple):
    """A part of `content`."""

    text: str


class ReasoningDelta(NamedTuple):
    """A part of `reasoning_content`."""

    text: str


class ToolCallDelta(NamedTuple):
    """A part of the tool call with the number `index`.

    The first part has `id` and `name`, the following ones add to `arguments` (JSON text).
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which is unused here
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    @property
    def text(self) -> str:
        """Return the text of the part, as the other parts have it."""
        return self.arguments


OutputDelta = ContentDelta | ReasoningDelta | ToolCallDelta


def with_text(delta: OutputDelta, text: str) -> OutputDelta:
    """Return `delta` with another text."""
    return delta._replace(arguments=text) if isinstance(delta, ToolCallDelta) else type(delta)(text)


class OutputProcessor(ABC):
    """An incremental parser of one choice's text.

    Takes linear time and holds back only what may be a marker.
    """

    @abstractmethod
    def feed(self, text: str) -> Iterator[OutputDelta] | list[OutputDelta]:
        """Return the deltas that are certain after `text`."""

    def finish(self) -> Iterator[OutputDelta] | list[OutputDelta]:
        """Return what was held back, once the text has ended. Called once."""
        return []

    def name_calls(self, source: str) -> None:
        """Make the ids of tool calls from `source`, so that a replay has the same ones."""
        return

    @property
    def made_tool_calls(self) -> bool:
        """Return True if the finish reason `stop` becomes `tool_calls`."""
        return False

    @property
    def thinking(self) -> Sequence[tuple[int, float]]:
        """Return the (start, end) of each thinking part, without its markers.

        Positions are in characters of all text so far.
        """
        return ()


class ProcessorChain(OutputProcessor):
    """Processors one after another: the ContentDelta of each is the input of the next.

    An empty chain passes the text.
    """

    def __init__(self, processors: Sequence[OutputProcessor] = ()) -> None:
        self._processors = tuple(processors)

    def name_calls(self, source: str) -> None:
        for processor in self._processors:
            processor.name_calls(source)

    def feed(self, text: str) -> list[OutputDelta]:
        return self._run(self._processors, [ContentDelta(text)] if text else [])

    def finish(self) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        for at, processor in enumerate(self._processors):
            deltas += self._run(self._processors[at + 1 :], processor.finish())
        return deltas

    @property
    def made_tool_calls(self) -> bool:
        return any(processor.made_tool_calls for processor in self._processors)

    @property
    def thinking(self) -> Sequence[tuple[int, float]]:
        # only the first processor sees all of the text
        return self._processors[0].thinking if self._processors else ()

    @staticmethod
    def _run(processors: Sequence[OutputProcessor], deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
        result = list(deltas)
        for processor in processors:
            result = [
                out
                for delta in result
                for out in (processor.feed(delta.text) if isinstance(delta, ContentDelta) else (delta,))
            ]
        return result


def merge_adjacent(deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
    """Return `deltas` with neighbours of the same kind, and of the same call, joined."""
    merged: list[OutputDelta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if last is not None and _kind(last) == _kind(delta):
            merged[-1] = with_text(last, last.text + delta.text)
        else:
            merged.append(delta)
    return merged


def _kind(delta: OutputDelta) -> tuple[type[OutputDelta], int]:
    return type(delta), delta.index if isinstance(delta, ToolCallDelta) else 0
