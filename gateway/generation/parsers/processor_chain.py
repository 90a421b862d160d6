"""Processors applied one after another, and neighbouring pieces joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmops.gateway.generation.parsers.output_processor import (
    ContentDelta,
    OutputDelta,
    OutputProcessor,
    ReasoningDelta,
    ToolCallDelta,
)


class ProcessorChain(OutputProcessor):
    """Each processor's Text pieces are the next one's input; an empty chain lets the text through."""

    def __init__(self, processors: Sequence[OutputProcessor] = ()) -> None:
        self._processors = tuple(processors)

    def feed(self, text: str) -> list[OutputDelta]:
        return self._run(self._processors, [ContentDelta(text)] if text else [])

    def finish(self) -> list[OutputDelta]:
        pieces: list[OutputDelta] = []
        for at, processor in enumerate(self._processors):
            pieces += self._run(self._processors[at + 1 :], processor.finish())
        return pieces

    @property
    def made_tool_calls(self) -> bool:
        return any(processor.made_tool_calls for processor in self._processors)

    @property
    def thinking(self) -> Sequence[tuple[int, float]]:
        # only the first one sees all of the text
        return self._processors[0].thinking if self._processors else ()

    @staticmethod
    def _run(processors: Sequence[OutputProcessor], pieces: Iterable[OutputDelta]) -> list[OutputDelta]:
        done = list(pieces)
        for processor in processors:
            done = [
                out
                for piece in done
                for out in (processor.feed(piece.text) if isinstance(piece, ContentDelta) else (piece,))
            ]
        return done


def merge_adjacent(pieces: Iterable[OutputDelta]) -> list[OutputDelta]:
    """The same pieces, with neighbours of the same kind (and the same call) joined."""
    out: list[OutputDelta] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, ContentDelta) and isinstance(last, ContentDelta):
            out[-1] = ContentDelta(last.text + piece.text)
        elif isinstance(piece, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + piece.text)
        elif isinstance(piece, ToolCallDelta) and isinstance(last, ToolCallDelta) and piece.index == last.index:
            out[-1] = last._replace(arguments=last.arguments + piece.arguments)
        else:
            out.append(piece)
    return out
