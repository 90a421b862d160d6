"""Represent the weights of an exported checkpoint and the rounding of inputs.

Weights are float32 tensors, by transformers' names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmops.build.quantize import number_formats

_LARGEST = {"e4m3": number_formats.E4M3_MAX, "int8": 127.0}


@dataclass(frozen=True)
class InputRounding:
    """The rounding of a linear layer's input.

    The input is multiplied by `prequant` (in,), and then rounded to `kind`: `e4m3` or `int8` with
    the fixed `scale`, `e4m3_token` with a scale per token at run time, or `e4m3_block` with a scale
    per token and `block` inputs at run time.
    """

    kind: str | None = None
    scale: Tensor | None = None
    prequant: Tensor | None = None
    block: int = 0

    def largest(self) -> Tensor | None:
        """Return the magnitude beyond which inputs are clipped, or None without a fixed scale.

        With `prequant`, the result has a magnitude for each input.
        """
        if self.scale is None or self.kind not in _LARGEST:
            return None
        largest = self.scale.float() * _LARGEST[self.kind]
        return largest / self.prequant.float() if self.prequant is not None else largest

    def apply(self, value: Tensor) -> Tensor:
        """Round an input. `prequant` is not applied: `ExportedModel.weights` contain it."""
        if self.kind == "e4m3" and self.scale is not None:
            return number_formats.round_to_e4m3(value, self._steps(value))
        if self.kind == "int8" and self.scale is not None:
            return number_formats.round_to_int8(value, self._steps(value))
        if self.kind == "e4m3_token":
            return number_formats.round_to_e4m3(value, _largest(value) / number_formats.E4M3_MAX)
        if self.kind == "e4m3_block":
            parts = value.split(self.block, dim=-1)
            return torch.cat(
                [number_formats.round_to_e4m3(part, _largest(part) / number_formats.E4M3_MAX) for part in parts], dim=-1
            )
        if self.kind is None or self.kind in _LARGEST:
            return value
        raise ValueError(f"unknown rounding of inputs: {self.kind}")

    def _steps(self, value: Tensor) -> Tensor:
        """Return the step size of the rounding, in the unit of `value`.

        Rounding happens to `value * prequant`, so each input has its own step.
        """
        assert self.scale is not None
        scale = self.scale.to(value)
        return scale / self.prequant.to(value) if self.prequant is not None else scale


def _largest(value: Tensor) -> Tensor:
    return value.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)


@dataclass
class ExportedModel:
    """The weights of an export.

    `weights` are float32 tensors by transformers' names, with experts one by one. `inputs` is the
    rounding of inputs by module name. `kv_scales` are the scales of the KV cache, by the projection
    whose output is rounded.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, InputRounding] = field(default_factory=dict)
    kv_scales: dict[str, tuple[str, Tensor]] = field(default_factory=dict)

    def put(self, name: str, shares: Sequence[Tensor], dim: int = 0) -> None:
        """Add a weight, joined from the parts of the ranks along `dim`."""
        self.weights[name] = shares[0] if len(shares) == 1 else torch.cat(list(shares), dim=dim)


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear layer in its stored form: packed weight and scales.

    `later_bits` is the number of bits to which trtllm-build will quantise a 16-bit weight, or None.
    """

    weight: Tensor
    scale: Tensor | None = None
    prequant: Tensor | None = None
    later_bits: int | None = None

    def value(self) -> Tensor:
        """Return the effective float32 weight (…, out, in).

        The layer multiplies its input, without `prequant`, by this weight.
        """
        value = number_formats.dequantise(self.weight, self.scale)
        if self.later_bits is not None:
            return number_formats.round_per_channel(value, self.later_bits)
        if self.prequant is None:
            return value
        factors = self.prequant.float()
        # Factors of stacked experts (experts, in) need one more dimension, for the rows.
        return value * (factors.unsqueeze(-2) if factors.dim() > 1 else factors)
