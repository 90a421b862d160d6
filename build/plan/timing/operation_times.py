"""How long one operation takes on one GPU: the border between the planner and whatever knows the hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one rank. `latent` > 0 is MLA: keys and values of all heads are one vector of that many values;
    `window` > 0: a token sees only that many before it."""

    heads: int
    kv_heads: int
    head_dim: int
    kv: str = "bf16"
    compute: str = "bf16"
    latent: int = 0
    window: int = 0

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's keys and values."""
        width = 1 if self.kv in ("fp8", "int8") else 2
        return (self.latent if self.latent else 2 * self.kv_heads * self.head_dim) * width


@dataclass(frozen=True)
class ExpertsShape:
    """One MoE layer: sizes of the whole layer, split over `tp` * `ep` ranks."""

    hidden: int
    intermediate: int
    top_k: int
    count: int
    tp: int
    ep: int


class OperationTimes(Protocol):
    """Seconds per call. `bits` are per weight, `compute` is bf16, fp8 or int8, sizes are those of one rank."""

    label: str

    def gemm(self, m: int, n: int, k: int, precision: str) -> float:
        """[m, k] times a weight of [n, k], with what it takes to quantise the input."""
        ...

    def prefill(self, prompts: int, tokens: int, prefix: int, attention: AttentionShape) -> float:
        """`prompts` prompts of `tokens` new tokens each, after `prefix` cached ones; causal."""
        ...

    def decode(self, batch: int, length: int, attention: AttentionShape) -> float:
        """One new token for each of `batch` sequences that have `length` tokens in the cache."""
        ...

    def moe(self, tokens: int, experts: ExpertsShape, precision: str) -> float:
        """The experts of one layer for `tokens` tokens, routing not counted."""
        ...

    def all_reduce(self, values: int, ranks: int) -> float:
        """Sum of `values` 16-bit values over the ranks of one node."""
        ...

    def memory(self, bytes_: float) -> float:
        """An element-wise kernel that moves this many bytes."""
        ...

    def send(self, bytes_: float, nodes: bool) -> float:
        """Point to point, within the node or over the network."""
        ...
