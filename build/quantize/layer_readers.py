"""Read linear layers of quantised Hugging Face checkpoints as float32, one reader per storage format.

All formats that llmops makes share `ModelOptReader`; `number_formats.py` knows how each is packed.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from llmops.build.checkpoint.description import compressed_tensors_algorithm
from llmops.build.quant_formats import buildable_formats, format_of_algorithm
from llmops.build.quantize.exported_weights import InputRounding, QuantizedLinear
from llmops.errors import InputError

#: The stored tensors of a layer, by the last part of their name: weight, weight_scale, …
Stored = Mapping[str, Tensor]


class LayerReader(Protocol):
    """A reader of one storage format.

    `names` are the names of a quantised layer's tensors, except `weight`.
    """

    names: frozenset[str]

    def quantised(self, stored: Stored) -> bool:
        """Return True if the layer is quantised. Checkpoints have unquantised layers too."""

    def weight(self, stored: Stored) -> Tensor:
        """Return the float32 weight (out, in)."""

    def rounding(self, stored: Stored) -> InputRounding | None:
        """Return the rounding of the layer's inputs, or None if inputs are not rounded."""


class Fp8Reader:
    """A reader of FP8 layers: `quant_method: fp8`, and compressed-tensors of llm-compressor.

    DeepSeek-V3 and Qwen3 publish such checkpoints on the Hugging Face hub.

    Weights are E4M3. The tensor `scale` has their factors, float32 per block, and with a `block` of
    None per output. It is `weight_scale_inv` for `fp8`, despite its meaning. Inputs are rounded at
    run time, per token and block of inputs (transformers `integrations/finegrained_fp8.py`), or per
    token.
    """

    def __init__(self, scale: str, block: tuple[int, int] | None, static: bool = False) -> None:
        self.scale, self.block, self.static = scale, block, static
        self.names = frozenset({scale, "activation_scale", "input_scale", "k_scale", "v_scale"})

    def quantised(self, stored: Stored) -> bool:
        return self.scale in stored

    def weight(self, stored: Stored) -> Tensor:
        weight, scale = stored["weight"].float(), stored[self.scale].float()
        if self.block is None:
            return weight * scale.reshape(-1, 1)
        (rows, columns), (high, wide) = weight.shape, self.block
        whole = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        return weight * whole

    def rounding(self, stored: Stored) -> InputRounding | None:
        if self.static:
            scale = stored.get("activation_scale", stored.get("input_scale"))
            return InputRounding("e4m3", None if scale is None else scale.float())
        return InputRounding("e4m3_token") if self.block is None else InputRounding("e4m3_block", block=self.block[1])


#: ModelOpt's algorithms that a Hugging Face folder may have and that can be read back.
ALGORITHMS = frozenset(
    quant_format.algorithm for quant_format in buildable_formats("pytorch").values() if quant_format.algorithm
)


class ModelOptReader:
    """A reader of the layers of NVIDIA ModelOpt's `hf_quant_config.json` checkpoints."""

    names = frozenset({"weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "k_scale", "v_scale"})

    def __init__(self, algorithm: str) -> None:
        quant_format = format_of_algorithm(algorithm)
        self.kind = quant_format.inputs if quant_format else None

    def quantised(self, stored: Stored) -> bool:
        return "weight_scale" in stored

    def weight(self, stored: Stored) -> Tensor:
        return QuantizedLinear(stored["weight"], stored["weight_scale"], stored.get("pre_quant_scale")).value()

    def rounding(self, stored: Stored) -> InputRounding | None:
        if self.kind is None:
            return None
        return InputRounding(self.kind, stored.get("input_scale"), stored.get("pre_quant_scale"))


_INSTEAD = "measure the served model instead (`llmops bench`, your own evaluation)"


def reader_of(config: dict[str, Any], modelopt: dict[str, Any]) -> LayerReader:
    """Return the reader for the format of a checkpoint.

    Args:
        config: The content of config.json.
        modelopt: The object `quantization` of hf_quant_config.json, or an empty mapping without
            this file.

    Raises:
        InputError: The format cannot be read back.
    """
    quantised = config.get("quantization_config")
    if modelopt or not isinstance(quantised, dict):
        return _modelopt(str(modelopt.get("quant_algo") or ""))
    method = str(quantised.get("quant_method", "")).lower()
    if method == "modelopt":
        return _modelopt(str(quantised.get("quant_algo") or ""))
    if method == "fp8" and (block := quantised.get("weight_block_size")):
        static = quantised.get("activation_scheme") == "static"
        return Fp8Reader("weight_scale_inv", (int(block[0]), int(block[1])), static)
    algorithm = compressed_tensors_algorithm(quantised) if method == "compressed-tensors" else None
    if algorithm is None:
        raise _unreadable(f"{method or 'unknown'} weights")
    return Fp8Reader("weight_scale", (128, 128) if algorithm == "FP8_BLOCK_SCALES" else None)


def _unreadable(what: str) -> InputError:
    return InputError(f"{what} cannot be read back, so they cannot be compared with a source; {_INSTEAD}.")


def _modelopt(algorithm: str) -> LayerReader:
    if algorithm and algorithm not in ALGORITHMS:
        raise _unreadable(f"ModelOpt's {algorithm} weights")
    return ModelOptReader(algorithm)
