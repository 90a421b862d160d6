"""The size of prefill chunks.

The size bounds the prompt tokens that a step may read, so that running answers keep their pace.

A step takes longer the more prompt tokens it reads and the more tokens precede them: `seconds = a +
b * tokens + c * depth + d * tokens * depth`. The four terms are fitted to measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Smaller chunks slow prompts down without shorter steps: the step then only reads weights and
#: cache.
MIN_CHUNK = 32


class MeasuredStep(NamedTuple):
    """The duration of a step that read `tokens` prompt tokens after `depth` earlier ones."""

    tokens: int
    depth: int
    seconds: float


def smallest_chunk(max_chunk: int, min_chunk: int) -> int:
    """Return the last of the halves of `max_chunk` that is not below `min_chunk` and MIN_CHUNK."""
    while max_chunk // 2 >= max(min_chunk, MIN_CHUNK):
        max_chunk //= 2
    return max_chunk


def mean_seconds(steps: Sequence[MeasuredStep], chunk: int, prompt_length: int) -> float:
    """Return the mean duration of the steps that read a prompt in chunks.

    Args:
        steps: Measured steps of at least two depths: of `chunk` tokens, or of two other sizes.
        chunk: The tokens of each step.
        prompt_length: The length of the prompt in tokens.
    """
    rows = np.array([[1, step.tokens, step.depth, step.tokens * step.depth] for step in steps], float)
    terms = np.linalg.lstsq(rows, np.array([step.seconds for step in steps]), rcond=None)[0]
    depth = prompt_length / 2
    return float(terms @ [1, chunk, depth, chunk * depth])


def largest_chunk(
    steps: Sequence[MeasuredStep], seconds: float, prompt_length: int, max_chunk: int, min_chunk: int
) -> int:
    """Return the largest chunk whose mean step meets an objective while the longest prompt is read.

    Args:
        steps: Measured steps of at least two sizes and two depths.
        seconds: The objective for the mean step.
        prompt_length: The length of the longest prompt in tokens.
        max_chunk: The chunk to begin with. It is halved until the objective is met.
        min_chunk: The smallest chunk, whatever the objective.
    """
    chunk, smallest = max_chunk, smallest_chunk(max_chunk, min_chunk)
    while chunk > smallest and mean_seconds(steps, chunk, prompt_length) > seconds:
        chunk //= 2
    return chunk
