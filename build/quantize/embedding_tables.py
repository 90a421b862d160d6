"""Embedding and output matrices, read rows at a time.

With a large vocabulary, such a matrix is larger than any layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmops.build.checkpoint.weight_sources import SafetensorsFile, Weight
from llmops.build.quantize.calibration import CACHED_TABLE_BYTES

EMBEDDING, HEAD = TABLES = ("model.embed_tokens.weight", "lm_head.weight")
#: Number of rows that `blocks` reads at once, which bounds the memory for a large vocabulary.
BLOCK = 8192

Index: TypeAlias = "slice | NDArray[np.int64]"


class EmbeddingTable(ABC):
    """A float32 matrix (rows, columns), of which rows are read when requested."""

    shape: tuple[int, int]

    @abstractmethod
    def rows(self, index: Index) -> Tensor:
        """Return the selected rows, in float32 on the CPU."""

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows in order, `BLOCK` at a time."""
        for start in range(0, self.shape[0], BLOCK):
            yield self.rows(slice(start, min(start + BLOCK, self.shape[0])))


class DenseTable(EmbeddingTable):
    """A matrix in memory."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.shape = (matrix.shape[0], matrix.shape[1])

    def rows(self, index: Index) -> Tensor:
        return self.matrix[index if isinstance(index, slice) else torch.from_numpy(index)]


class StoredTable(EmbeddingTable):
    """A matrix that is stored as shards of rows, one after the other.

    Rows after the first `rows` are padding.
    """

    def __init__(self, shards: Sequence[Weight], rows: int | None = None) -> None:
        self.shards = shards
        self.starts = np.cumsum([0, *(shard.shape[0] for shard in shards)])
        self.shape = (min(int(self.starts[-1]), rows or int(self.starts[-1])), shards[0].shape[1])

    def rows(self, index: Index) -> Tensor:
        requested = np.arange(*index.indices(self.shape[0])) if isinstance(index, slice) else index
        found = np.empty((len(requested), self.shape[1]), np.float32)
        for shard, start, end in zip(self.shards, self.starts, self.starts[1:], strict=False):
            inside = (requested >= start) & (requested < end)
            found[inside] = shard.float32(requested[inside] - start)
        return torch.from_numpy(found)


def cache_if_small(table: EmbeddingTable) -> EmbeddingTable:
    """Return the table, as a copy in memory if it is small."""
    small = table.shape[0] * table.shape[1] * 4 <= CACHED_TABLE_BYTES
    return DenseTable(table.rows(slice(None))) if small and isinstance(table, StoredTable) else table


def stored_table(parts: Sequence[tuple[Path, str]], rows: int | None = None) -> EmbeddingTable | None:
    """Return the table whose shards are `parts`, pairs of a safetensors file and a tensor, or None.

    The result is None if a tensor is missing or is not a plain matrix. The table has only the first
    `rows` rows of the shards, or all rows for None.
    """
    shards = [SafetensorsFile(path).get(name) for path, name in parts]
    found = [shard for shard in shards if shard is not None and len(shard.shape) == 2]
    return cache_if_small(StoredTable(found, rows)) if found and len(found) == len(shards) else None
