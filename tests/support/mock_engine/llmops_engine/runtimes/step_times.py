"""The duration of a step, interpolated from a table that `llmops plan` made."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTable:
    """Seconds of a step. `decode[i][j]`: `batches[i]` sequences that each get a token, with `lengths[j]` tokens in the
    cache. `alone[i][j]`: a step that only reads `chunks[i]` tokens of prompts after `prefixes[j]` cached ones;
    `added[i][j]`: what reading them adds to a step that decodes as well. All axes ascend; beyond their ends the last
    two points go on.
    """

    batches: Sequence[int]
    lengths: Sequence[int]
    decode: Sequence[Sequence[float]]
    chunks: Sequence[int]
    prefixes: Sequence[int]
    alone: Sequence[Sequence[float]]
    added: Sequence[Sequence[float]]

    def seconds(self, batch: int, length: float, chunk: int = 0, prefix: float = 0.0) -> float:
        """Return the seconds of a step.

        In the step, `batch` sequences of `length` tokens (mean) decode, and `chunk` tokens of
        prompts are read.
        """
        if not batch:
            return _at(self.chunks, self.prefixes, self.alone, chunk, prefix) if chunk else 0.0
        plain = _at(self.batches, self.lengths, self.decode, batch, length)
        return plain + (_at(self.chunks, self.prefixes, self.added, chunk, prefix) if chunk else 0.0)


def _at(
    rows: Sequence[int], columns: Sequence[int], table: Sequence[Sequence[float]], row: float, column: float
) -> float:
    i, across = _place(rows, row)
    j, along = _place(columns, column)
    if len(columns) == 1:
        low, high = table[i][0], table[min(i + 1, len(rows) - 1)][0]
    else:
        low = table[i][j] + along * (table[i][j + 1] - table[i][j])
        next_ = table[min(i + 1, len(rows) - 1)]
        high = next_[j] + along * (next_[j + 1] - next_[j])
    return max(0.0, low + across * (high - low))


def _place(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The interval of `axis` for `value`, and how far along it that is."""
    if len(axis) == 1:
        return 0, 0.0
    at = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])
