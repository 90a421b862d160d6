"""Weights of an exported checkpoint: float32 tensors under transformers' names, and the rounding of
inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmops.build.quantize import number_formats

_LARGEST = {"e4m3": number_formats.E4M3_MAX, "int8": 127.0}
# a value, and how far rounding may have moved it
Part = tuple[Tensor, Tensor | None]


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
        """Return the input beyond which values are clipped, per input with `prequant`, or None
        without a scale.
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
        return value

    def _steps(self, value: Tensor) -> Tensor:
        """Return the step size in terms of `value`: rounding happens to `value * prequant`, so each
        input has its own step.
        """
        assert self.scale is not None
        scale = self.scale.to(value)
        return scale / self.prequant.to(value) if self.prequant is not None else scale


def _largest(value: Tensor) -> Tensor:
    return value.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)


@dataclass
class ExportedModel:
    """`weights` in transformers' names (experts one by one) and, where asked for, `bounds`, how far rounding may have
    moved each; `inputs` by module name; `kv_scales` by the projection whose output rounds."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, InputRounding] = field(default_factory=dict)
    kv_scales: dict[str, tuple[str, Tensor]] = field(default_factory=dict)
    bounds: dict[str, Tensor] = field(default_factory=dict)

    def put(self, name: str, parts: list[Part], dim: int = 0) -> None:
        """A weight from the shares of the ranks, which cut it along `dim`."""
        self.weights[name] = _joined([value for value, _ in parts], dim)
        bounds = [bound for _, bound in parts if bound is not None]
        if bounds:
            self.bounds[name] = _joined(bounds, dim)


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)


@dataclass(frozen=True)
class QuantizedLinear:
    """One linear layer as stored: packed weight and its scales, in whatever names the file had. `later_bits` where
    trtllm-build is still to quantise the 16-bit weight."""

    weight: Tensor
    scale: Tensor | None = None
    prequant: Tensor | None = None
    later_bits: int | None = None

    def part(self, bounds: bool) -> Part:
        return self.value(), self.bound() if bounds else None

    def value(self) -> Tensor:
        """Return the effective float32 weight (…, out, in), by which the layer multiplies its
        unscaled input.
        """
        value = number_formats.dequantise(self.weight, self.scale)
        if self.later_bits is not None:
            return number_formats.round_per_channel(value, self.later_bits)
        return value * self._factors() if self.prequant is not None else value

    def _factors(self) -> Tensor:
        """Return the factors per input. Stacked experts (experts, in) get a dimension for the rows."""
        assert self.prequant is not None
        factors = self.prequant.float()
        return factors.unsqueeze(-2) if factors.dim() > 1 else factors

    def bound(self) -> Tensor:
        bound = number_formats.rounding_bound(self.weight, self.scale)
        if self.prequant is None:
            return bound
        # the factors themselves are stored in 16 bits
        stored = 2.0**-8 if self.prequant.dtype == torch.bfloat16 else 2.0**-10
        return bound * self._factors().abs() * (1 + stored) + self.value().abs() * stored
