"""NVIDIA ModelOpt's `hf_quant_config.json` checkpoints."""

from __future__ import annotations

from llmops.build.formats import buildable, format_of_algorithm
from llmops.build.quantize.reading import InputRounding, Part, StoredLinear
from llmops.build.quantize.stored.base import Stored

# those that a Hugging Face folder can have
ALGORITHMS = frozenset(form.algorithm for form in buildable("pytorch").values() if form.algorithm)


class ModelOpt:
    names = frozenset({"weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "k_scale", "v_scale"})

    def __init__(self, algorithm: str) -> None:
        form = format_of_algorithm(algorithm)
        self.kind = form.inputs if form else None

    def quantised(self, stored: Stored) -> bool:
        return "weight_scale" in stored

    def part(self, stored: Stored, bounds: bool) -> Part:
        return StoredLinear(stored["weight"], stored["weight_scale"], stored.get("pre_quant_scale")).part(bounds)

    def rounding(self, stored: Stored) -> InputRounding | None:
        if self.kind is None:
            return None
        return InputRounding(self.kind, stored.get("input_scale"), stored.get("pre_quant_scale"))
