"""Weights of an exported checkpoint, and the rounding of inputs.

Weights are float32 tensors under the names that transformers uses.
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

    The input is multiplied by `prequant` (in,), then rounded to `kind`: `e4m3` or `int8` with
    `scale`, `e4m3_token` or `int8_token` with a scale per token at run time, or `e4m3_block` per
    token and `block` inputs.
    """

    kind: str | None = None
    scale: Tensor | None = None
    prequant: Tensor | None = None
    block: int = 0

    def largest(self) -> Tensor | None:
        """Return the input magnitude beyond which values are clipped, or None without a scale.

        With `prequant`, there is a value per input.
        """
        if self.scale is None or self.kind not in _LARGEST:
            return None
        largest = self.scale.float() * _LARGEST[self.kind]
        return largest / self.prequant.float() if self.prequant is not None else largest

    def apply(self, value: Tensor) -> Tensor:
        """Round a value. `prequant` is not applied here: `ExportedModel.weights` contain it."""
        if self.kind == "e4m3" and self.scale is not None:
            return number_formats.round_to_e4m3(value, self._steps(value))
        if self.kind == "int8" and self.scale is not None:
            return number_formats.round_to_int8(value, self._steps(value))
        if self.kind == "e4m3_token":
            return number_formats.round_to_e4m3(value, _largest(value) / number_formats.E4M3_MAX)
        if self.kind == "int8_token":
            return number_formats.round_to_int8(value, _largest(value) / 127)
        if self.kind == "e4m3_block":
            parts = value.split(self.block, dim=-1)
            return torch.cat(
                [number_formats.round_to_e4m3(part, _largest(part) / number_formats.E4M3_MAX) for part in parts], dim=-1
            )
        if self.kind is None or self.kind in _LARGEST:
            return value
        raise ValueError(f"unknown rounding of inputs: {self.kind}")

    def _steps(self, value: Tensor) -> Tensor:
        """Return the step size in terms of `value`.

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

    `weights` are float32 in transformers' names (experts one by one), `inputs` the rounding of
    inputs by module name, `kv_scales` those of the KV cache by the projection whose output rounds.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, InputRounding] = field(default_factory=dict)
    kv_scales: dict[str, tuple[str, Tensor]] = field(default_factory=dict)

    def put(self, name: str, shares: Sequence[Tensor], dim: int = 0) -> None:
        """Join a weight from the shares of the ranks, which cut it along `dim`."""
        self.weights[name] = shares[0] if len(shares) == 1 else torch.cat(list(shares), dim=dim)


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear layer as stored: packed weight and scales.

    `later_bits` is set where trtllm-build will still quantise the 16-bit weight.
    """

    weight: Tensor
    scale: Tensor | None = None
    prequant: Tensor | None = None
    later_bits: int | None = None

    def value(self) -> Tensor:
        """Return the effective float32 weight (…, out, in).

        The layer multiplies its unscaled input by this weight.
        """
        value = number_formats.dequantise(self.weight, self.scale)
        if self.later_bits is not None:
            return number_formats.round_per_channel(value, self.later_bits)
        if self.prequant is None:
            return value
        factors = self.prequant.float()
        # Stacked experts (experts, in) need a dimension for the rows.
        return value * (factors.unsqueeze(-2) if factors.dim() > 1 else factors)
