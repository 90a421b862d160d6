"""The choice of the prefill chunk size.

The chunk size bounds the prompt tokens that a step may read, so that running answers keep their
pace. A step takes longer with the number of prompt tokens it reads, and with the number of tokens
before them (the depth): `seconds = a + b * tokens + c * depth + d * tokens * depth`. The four terms
are fitted to measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Minimum chunk size in tokens. Smaller chunks slow prompts down without making steps shorter,
#: because reading the weights and the cache then takes all of the step.
MIN_CHUNK = 32


class MeasuredStep(NamedTuple):
    """The duration of a step that read `tokens` prompt tokens after `depth` earlier tokens."""

    tokens: int
    depth: int
    seconds: float


def smallest_chunk(max_chunk: int, min_chunk: int) -> int:
    """Return `max_chunk`, halved while the result is at least `min_chunk` and MIN_CHUNK."""
    while max_chunk // 2 >= max(min_chunk, MIN_CHUNK):
        max_chunk //= 2
    return max_chunk


def mean_seconds(steps: Sequence[MeasuredStep], chunk: int, prompt_length: int) -> float:
    """Return the mean duration of the steps that read a prompt in chunks.

    Args:
        steps: Measured steps of at least two depths. All steps have `chunk` tokens, or the steps
            have at least two other sizes.
        chunk: The number of prompt tokens that each step reads.
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
        seconds: The maximum duration of the mean step.
        prompt_length: The length of the longest prompt in tokens.
        max_chunk: The chunk size to begin with, in tokens. The size is halved until the objective
            is met.
        min_chunk: The smallest chunk size in tokens, even if the objective is not met.
    """
    chunk, smallest = max_chunk, smallest_chunk(max_chunk, min_chunk)
    while chunk > smallest and mean_seconds(steps, chunk, prompt_length) > seconds:
        chunk //= 2
    return chunk
