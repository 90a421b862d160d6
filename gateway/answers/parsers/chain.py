"""Processors applied one after another, and neighbouring pieces joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmops.gateway.answers.parsers.pieces import Piece, Processor, Reasoning, Text, ToolCall


class Chain(Processor):
    """Each processor's Text pieces are the next one's input; an empty chain lets the text through."""

    def __init__(self, processors: Sequence[Processor] = ()) -> None:
        self._processors = tuple(processors)

    def feed(self, text: str) -> list[Piece]:
        return self._run(self._processors, [Text(text)] if text else [])

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
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
    def _run(processors: Sequence[Processor], pieces: Iterable[Piece]) -> list[Piece]:
        done = list(pieces)
        for processor in processors:
            done = [
                out for piece in done for out in (processor.feed(piece.text) if isinstance(piece, Text) else (piece,))
            ]
        return done


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces, with neighbours of the same kind (and the same call) joined."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, ToolCall) and isinstance(last, ToolCall) and piece.index == last.index:
            out[-1] = last._replace(arguments=last.arguments + piece.arguments)
        else:
            out.append(piece)
    return out
