"""The parts of an answer, and the processors that find them in a choice's text.

The parts are content, thinking and tool calls.

A choice's text passes through a chain of processors: first reasoning, then tools. Each processor
turns text into deltas, and the next processor in the chain receives only the ContentDelta objects
among them. Each choice has its own processors, and `feed` gets text that is split anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

#: Number of deltas of an answer that is sent whole after which they are merged.
DELTAS_BETWEEN_MERGES = 1024


class ContentDelta(NamedTuple):
    """A part of the answer's `content`."""

    text: str


class ReasoningDelta(NamedTuple):
    """A part of the answer's `reasoning_content`."""

    text: str


class ToolCallDelta(NamedTuple):
    """A part of a tool call.

    The first part of a call has `id` and `name`; the following parts add to `arguments`.

    Attributes:
        index: The number of the call in the answer.
        id: The id of the call; None after the first part.
        name: The name of the function; None after the first part.
        arguments: A part of the arguments, as JSON text.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which is unused here
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    @property
    def text(self) -> str:
        """Return the text of the part, under the same name as for the other kinds of delta."""
        return self.arguments


OutputDelta = ContentDelta | ReasoningDelta | ToolCallDelta


def with_text(delta: OutputDelta, text: str) -> OutputDelta:
    """Return a copy of `delta` with another text."""
    return delta._replace(arguments=text) if isinstance(delta, ToolCallDelta) else type(delta)(text)


class OutputProcessor(ABC):
    """An incremental parser of one choice's text.

    The parser takes linear time and holds back only text that may be a marker.
    """

    @abstractmethod
    def feed(self, text: str) -> Iterator[OutputDelta] | list[OutputDelta]:
        """Add `text`, and return the deltas that are certain now."""

    def finish(self) -> Iterator[OutputDelta] | list[OutputDelta]:
        """Return the deltas of the text that was held back. Called once, when the text has ended."""
        return []

    def name_calls(self, source: str) -> None:
        """Derive the ids of tool calls from `source`, so that a replay makes the same ids."""
        return

    @property
    def made_tool_calls(self) -> bool:
        """Return True if the answer has calls: its finish reason `stop` becomes `tool_calls`."""
        return False

    @property
    def thinking(self) -> Sequence[tuple[int, float]]:
        """Return the start and the end of each thinking part, without its markers.

        Positions are in characters of the whole text so far.
        """
        return ()


class ProcessorChain(OutputProcessor):
    """A chain of processors: the ContentDelta objects of each processor are the input of the next.

    An empty chain passes the text on.
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
        # Only the first processor sees the whole text.
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
    """Return `deltas` with adjacent deltas of the same kind, and of the same call, merged."""
    merged: list[OutputDelta] = []
    for _, same in groupby(deltas, _kind):
        found = list(same)
        merged.append(with_text(found[0], "".join(delta.text for delta in found)))
    return merged


def add_deltas(found: list[OutputDelta], deltas: Sequence[OutputDelta]) -> None:
    """Append the deltas of an answer that is sent whole.

    They are merged from time to time, because a delta takes some 80 bytes for a token's text.
    """
    found += deltas
    if deltas and len(found) % DELTAS_BETWEEN_MERGES == 0:
        found[:] = merge_adjacent(found)


def _kind(delta: OutputDelta) -> tuple[type[OutputDelta], int]:
    return type(delta), delta.index if isinstance(delta, ToolCallDelta) else 0
