"""NVIDIA ModelOpt's `hf_quant_config.json` checkpoints."""

from __future__ import annotations

from llmops.build.quant_formats import buildable_formats, format_of_algorithm
from llmops.build.quantize.exported_weights import InputRounding, Part, QuantizedLinear
from llmops.build.quantize.layer_readers.reader_interface import Stored

# those that a Hugging Face folder can have
ALGORITHMS = frozenset(form.algorithm for form in buildable_formats("pytorch").values() if form.algorithm)


class ModelOptReader:
    names = frozenset({"weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "k_scale", "v_scale"})

    def __init__(self, algorithm: str) -> None:
        form = format_of_algorithm(algorithm)
        self.kind = form.inputs if form else None

    def quantised(self, stored: Stored) -> bool:
        return "weight_scale" in stored

    def part(self, stored: Stored, bounds: bool) -> Part:
        return QuantizedLinear(stored["weight"], stored["weight_scale"], stored.get("pre_quant_scale")).part(bounds)

    def rounding(self, stored: Stored) -> InputRounding | None:
        if self.kind is None:
            return None
        return InputRounding(self.kind, stored.get("input_scale"), stored.get("pre_quant_scale"))
