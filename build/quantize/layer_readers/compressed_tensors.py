"""`quant_method: compressed-tensors` (llm-compressor): FP8 or INT8 weights with `weight_scale` per tensor, output or
block, and 4- or 8-bit integers packed along the inputs in `weight_packed`, shifted to be unsigned (vllm-project/
compressed-tensors `compressors/`)."""

from __future__ import annotations

from torch import Tensor

from llmops.build.quantize.exported_weights import InputRounding, Part
from llmops.build.quantize.layer_readers.reader_interface import Stored, expand_scales, unpack_words


class CompressedTensorsReader:
    names = frozenset({
        "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale",
        "input_zero_point", "k_scale", "v_scale",
    })  # fmt: skip

    def __init__(self, bits: int, input_kind: str | None) -> None:
        self.bits, self.input_kind = bits, input_kind

    def quantised(self, stored: Stored) -> bool:
        return "weight_scale" in stored

    def part(self, stored: Stored, bounds: bool) -> Part:
        values, zeros = self._values(stored)
        scales = self._whole(stored["weight_scale"].float(), values, stored)
        if zeros is not None:
            values = values - self._whole(zeros.float(), values, stored)
        return values * scales, None

    def _values(self, stored: Stored) -> tuple[Tensor, Tensor | None]:
        """(float32 (out, in), zero points as many as there are scales)."""
        zeros = stored.get("weight_zero_point")
        if "weight_packed" not in stored:
            return stored["weight"].float(), zeros
        rows, columns = (int(size) for size in stored["weight_shape"])
        half = 1 << (self.bits - 1)
        values = unpack_words(stored["weight_packed"], self.bits)[:rows, :columns] - half
        if zeros is not None:  # packed along the outputs
            zeros = unpack_words(zeros.T.contiguous(), self.bits).T[:rows] - half
        return values.float(), zeros

    @staticmethod
    def _whole(scale: Tensor, values: Tensor, stored: Stored) -> Tensor:
        if scale.dim() < 2:
            return scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
        if "weight_g_idx" in stored:
            return scale[:, stored["weight_g_idx"].long()]
        return expand_scales(expand_scales(scale, values.shape[0], 0), values.shape[1], 1)

    def rounding(self, stored: Stored) -> InputRounding | None:
        if self.input_kind is None:
            return None
        scale = stored.get("input_scale")
        return InputRounding(self.input_kind, None if scale is None else scale.float().reshape(()))
