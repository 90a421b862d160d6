"""One linear layer's tensors on disk -> its float32 weight and how its inputs round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from llmops.build.quantize.exported_weights import InputRounding, Part

# the layer's tensors by the last part of their name: weight, weight_scale, qzeros, …
Stored = Mapping[str, Tensor]


class LayerReader(Protocol):
    """A format. `names` are the tensors that belong to a quantised layer beside `weight`."""

    names: frozenset[str]

    def quantised(self, stored: Stored) -> bool:
        """Whether this layer is: checkpoints leave some as they were."""

    def part(self, stored: Stored, bounds: bool) -> Part:
        """float32 (out, in) and, where asked for and known, how far rounding may have moved each value."""

    def rounding(self, stored: Stored) -> InputRounding | None:
        """None where inputs stay as they are."""


def unpack_words(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 (rows, words) -> int32 (rows, words * 32 / bits), unsigned values, the lowest bits first. `order` says at
    which place of a word the next value lies, where that is another."""
    places = order or tuple(range(32 // bits))
    shifts = torch.tensor([place * bits for place in places], dtype=torch.int64)
    values = (words.to(torch.int64).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2).to(torch.int32)


def expand_scales(scales: Tensor, size: int, dim: int) -> Tensor:
    """Each scale for its share of `size` values along `dim`; the last block may be cut short."""
    block = -(-size // scales.shape[dim])
    return scales.repeat_interleave(block, dim).narrow(dim, 0, size)
