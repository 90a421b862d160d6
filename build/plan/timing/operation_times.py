"""Interface for the duration of single GPU operations.

The roofline model and measured tables implement it.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class AttentionShape:
    """The attention heads of one rank.

    `latent` > 0 is MLA: keys and values of all heads are one vector of that many values. `window` >
    0 limits a token to that many tokens before it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv: str = "bf16"
    compute: str = "bf16"
    latent: int = 0
    window: int = 0

    @property
    def kv_bytes(self) -> float:
        """Return the bytes of one token's keys and values."""
        width = 1 if self.kv in ("fp8", "int8") else 2
        return (self.latent if self.latent else 2 * self.kv_heads * self.head_dim) * width


@dataclass(frozen=True)
class ExpertsShape:
    """The sizes of a whole MoE layer, which is split over `tp` × `ep` ranks."""

    hidden: int
    intermediate: int
    top_k: int
    count: int
    tp: int
    ep: int


class OperationTimes(Protocol):
    """Durations in seconds per call. Sizes are those of one rank."""

    label: str

    def gemm(self, m: int, n: int, k: int, precision: str) -> float:
        """Return the seconds of [m, k] times a weight of [n, k], including quantising the input."""
        ...

    def prefill(self, prompts: int, tokens: int, prefix: int, attention: AttentionShape) -> float:
        """Return the seconds of causal attention of `prompts` prompts.

        Each has `tokens` new tokens after `prefix` cached ones.
        """
        ...

    def decode(self, batch: int, length: int, attention: AttentionShape) -> float:
        """Return the seconds of attention of one decode step.

        Each of `batch` sequences with `length` cached tokens gains one new token.
        """
        ...

    def moe(self, tokens: int, experts: ExpertsShape, precision: str) -> float:
        """Return the seconds of one layer's experts for `tokens` tokens, without routing."""
        ...

    def all_reduce(self, values: int, ranks: int) -> float:
        """Return the seconds to sum `values` 16-bit values over the ranks of one node."""
        ...

    def memory(self, bytes_: float) -> float:
        """Return the seconds of an element-wise kernel that moves this many bytes."""
        ...

    def send(self, bytes_: float, nodes: bool) -> float:
        """Return the seconds of a point-to-point transfer.

        It is within the node, or over the network if `nodes`.
        """
        ...
