"""Whether the tensors of a file lie in it, and each in a place of its own."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from llmops.build.checkpoint.description import TensorInfo
from llmops.errors import CheckpointError


def check_tensor_ranges(path: Path, tensors: Iterable[TensorInfo], size: int) -> None:
    """Raises CheckpointError when a tensor reaches past the file's `size` bytes or into another tensor."""
    placed = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = max((tensor.offset + tensor.nbytes for tensor in placed), default=0)
    if end > size:
        raise CheckpointError(
            f"{path} is truncated: it has {size:,} bytes, its tensors need {end:,}; download it again."
        )
    for before, after in pairwise(placed):
        if before.offset + before.nbytes > after.offset:
            raise CheckpointError(
                f"{path} is damaged: {before.name} and {after.name} overlap in it; download it again."
            )
