"""The interface of the durations of single GPU operations.

The roofline model and measured tables implement it.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class AttentionShape:
    """The shape of attention on one rank.

    With `latent` > 0, attention is MLA: the keys and values of all heads are one vector of `latent`
    values. With `window` > 0, a token sees only the last `window` tokens. `kv` is the dtype of the
    KV cache, and `compute` the dtype of the arithmetic.
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
        """Return the bytes of one token's keys and values in one layer."""
        width = 1 if self.kv in ("fp8", "int8") else 2
        return (self.latent if self.latent else 2 * self.kv_heads * self.head_dim) * width


@dataclass(frozen=True)
class ExpertsShape:
    """The sizes of a whole MoE layer, which `tp` × `ep` ranks share.

    Each token uses `top_k` of the `count` experts, whose widths are `hidden` and `intermediate`.
    """

    hidden: int
    intermediate: int
    top_k: int
    count: int
    tp: int
    ep: int


class OperationTimes(Protocol):
    """The durations of GPU operations, in seconds per call. Arguments are the sizes on one rank."""

    label: str

    def gemm(self, m: int, n: int, k: int, precision: str) -> float:
        """Return the seconds of an input [m, k] times a weight [n, k].

        The time to quantise the input is included.
        """
        ...

    def prefill(self, prompts: int, tokens: int, prefix: int, attention: AttentionShape) -> float:
        """Return the seconds of causal attention of `prompts` prompts.

        Each prompt has `tokens` new tokens after `prefix` cached tokens.
        """
        ...

    def decode(self, batch: int, length: int, attention: AttentionShape) -> float:
        """Return the seconds of attention of one decode step.

        Each of `batch` sequences with `length` cached tokens gains one new token.
        """
        ...

    def moe(self, tokens: int, experts: ExpertsShape, precision: str) -> float:
        """Return the seconds of one layer's experts for `tokens` tokens, without the router."""
        ...

    def all_reduce(self, values: int, ranks: int) -> float:
        """Return the seconds to sum `values` 16-bit values over the ranks of one node."""
        ...

    def memory(self, bytes_: float) -> float:
        """Return the seconds of an element-wise kernel that moves `bytes_` bytes."""
        ...

    def send(self, bytes_: float, nodes: bool) -> float:
        """Return the seconds of a point-to-point transfer.

        The transfer is within the node, or over the network if `nodes` is True.
        """
        ...
