"""Comparison of sequences of tokens and of texts."""

from collections.abc import Sequence


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of elements from the beginning that two sequences share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
