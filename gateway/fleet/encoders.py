"""What the embeddings endpoint sees of the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llmops.gateway.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class EmbeddingCard:
    """What an embedding model announces of itself. Lengths in tokens."""

    name: str
    target: str
    tokenizer_dir: str
    max_batch_size: int
    max_seq_len: int
    vocab_size: int
    dimensions: int
    built: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """One served encoder."""

    card: EmbeddingCard
    tokenizer: TextTokenizer


class Embedder(Protocol):
    """Finds embedding models and runs them."""

    def get(self, name: str) -> EmbeddingModel:
        """Raises ModelNotFoundError, or UnavailableError while Triton has not been reached."""
        ...

    def all(self) -> list[EmbeddingModel]: ...

    def is_ready(self, name: str) -> bool:
        """Whether the model could serve when Triton was last asked."""
        ...

    def problems(self) -> Mapping[str, str]:
        """Models that cannot be served, and why, in a sentence for clients."""
        ...

    async def embed(self, model: EmbeddingModel, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Vectors FP32 [len(rows), dimensions] in order. Raises ApiError for what Triton refuses or breaks on."""
        ...
