"""What an answer is made of, between text and chunks, and the processors that sort it.

A choice's text runs through a chain of processors (reasoning first, then tools); each takes text and yields pieces,
and the next one in the chain sees only the `ContentDelta` pieces. State is per choice; `feed` gets text cut anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ContentDelta(NamedTuple):
    """A part of `content`."""

    text: str


class ReasoningDelta(NamedTuple):
    """A part of `reasoning_content`."""

    text: str


class ToolCallDelta(NamedTuple):
    """A part of tool call `index`: the first has `id` and `name`, the following ones add to `arguments` (JSON text)."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    id: str | None = None
    name: str | None = None
    arguments: str = ""


OutputDelta = ContentDelta | ReasoningDelta | ToolCallDelta


class OutputProcessor(ABC):
    """Sorts one choice's text into pieces, incrementally: never quadratic, never holding more than may be a marker."""

    @abstractmethod
    def feed(self, text: str) -> Iterator[OutputDelta] | list[OutputDelta]:
        """Pieces that are certain after `text`."""

    @abstractmethod
    def finish(self) -> Iterator[OutputDelta] | list[OutputDelta]:
        """What was held back, now that no more text comes. Called once."""

    @property
    def made_tool_calls(self) -> bool:
        """Whether finish_reason `stop` becomes `tool_calls`."""
        return False

    @property
    def thinking(self) -> Sequence[tuple[int, float]]:
        """Where in all the text that was fed thinking stands: (start, end), without its markers."""
        return ()
