"""Hugging Face's `quant_method: fp8` with block scales, as DeepSeek-V3 and Qwen3 publish it: E4M3 weights,
`weight_scale_inv` (float32, despite its name what the weight is multiplied by) per block of 128 x 128, inputs rounded
at run time per token and 128 inputs (transformers `integrations/finegrained_fp8.py`)."""

from __future__ import annotations

from llmops.build.quantize.exported_weights import InputRounding, Part
from llmops.build.quantize.layer_readers.reader_interface import Stored


class BlockFp8Reader:
    names = frozenset({"weight_scale_inv", "activation_scale", "input_scale"})

    def __init__(self, block: tuple[int, int], static: bool) -> None:
        self.block, self.static = block, static

    def quantised(self, stored: Stored) -> bool:
        return "weight_scale_inv" in stored

    def part(self, stored: Stored, bounds: bool) -> Part:
        weight, scale = stored["weight"].float(), stored["weight_scale_inv"].float()
        (rows, columns), (high, wide) = weight.shape, self.block
        whole = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        return weight * whole, None

    def rounding(self, stored: Stored) -> InputRounding | None:
        if self.static:
            scale = stored.get("activation_scale", stored.get("input_scale"))
            return InputRounding("e4m3", None if scale is None else scale.float())
        return InputRounding("e4m3_block", block=self.block[1])
