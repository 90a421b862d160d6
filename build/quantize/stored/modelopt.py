"""NVIDIA ModelOpt's `hf_quant_config.json` checkpoints."""

from __future__ import annotations

from llmops.build.quantize.reading import InputRounding, Part, StoredLinear
from llmops.build.quantize.stored.base import Stored

_INPUT_KINDS = {"FP8": "e4m3", "W4A8_AWQ": "e4m3", "FP8_PER_CHANNEL_PER_TOKEN": "e4m3_token"}
ALGORITHMS = (*_INPUT_KINDS, "W4A16_AWQ", "W8A16")


class ModelOpt:
    names = frozenset({"weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "k_scale", "v_scale"})

    def __init__(self, algorithm: str) -> None:
        self.kind = _INPUT_KINDS.get(algorithm)

    def quantised(self, stored: Stored) -> bool:
        return "weight_scale" in stored

    def part(self, stored: Stored, bounds: bool) -> Part:
        return StoredLinear(stored["weight"], stored["weight_scale"], stored.get("pre_quant_scale")).part(bounds)

    def rounding(self, stored: Stored) -> InputRounding | None:
        if self.kind is None:
            return None
        return InputRounding(self.kind, stored.get("input_scale"), stored.get("pre_quant_scale"))
