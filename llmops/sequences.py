"""Comparison of sequences, such as token ids and texts."""

from collections.abc import Sequence


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
