"""Read linear layers of quantised Hugging Face checkpoints as float32, one reader per storage format.

All formats that llmops makes share `ModelOptReader`; `number_formats.py` knows how each is packed.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from llmops.build.quant_formats import buildable_formats, format_of_algorithm
from llmops.build.quantize.exported_weights import InputRounding, QuantizedLinear
from llmops.errors import InputError

#: The stored tensors of a layer, by the last part of their name: weight, weight_scale, qzeros, …
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


def unpack_words(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpack int32 (rows, words) to unsigned values in int32 (rows, words * 32 / bits).

    The lowest bits of a word are the first value. `order` lists the place of each value in a word,
    if the values are not in sequence.
    """
    places = order or tuple(range(32 // bits))
    shifts = torch.tensor([place * bits for place in places], dtype=torch.int64)
    values = (words.to(torch.int64).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2).to(torch.int32)


def expand_scales(scales: Tensor, size: int, dim: int) -> Tensor:
    """Repeat each scale for the values of its block along `dim`, up to `size` values.

    The last block may be shorter.
    """
    block = -(-size // scales.shape[dim])
    return scales.repeat_interleave(block, dim).narrow(dim, 0, size)


#: Places of the values 0, 1, … 7 in a word of AutoAWQ.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqReader:
    """A reader of AutoAWQ's layers (`quant_method: awq`, version gemm).

    `qweight` is int32 (in, out / 8), `qzeros` int32 (groups, out / 8), and `scales` float16
    (groups, out). `in / groups` inputs share a scale. Eight 4-bit values are in a word in the order
    0 2 4 6 1 3 5 7 (AutoAWQ `awq/utils/packing_utils.py`).
    """

    names = frozenset({"qweight", "qzeros", "scales"})

    def quantised(self, stored: Stored) -> bool:
        return "qweight" in stored

    def weight(self, stored: Stored) -> Tensor:
        values = unpack_words(stored["qweight"], 4, _PLACES)
        zeros = expand_scales(unpack_words(stored["qzeros"], 4, _PLACES), len(values), 0)
        scales = expand_scales(stored["scales"].float(), len(values), 0)
        return ((values - zeros).float() * scales).T.contiguous()

    def rounding(self, stored: Stored) -> InputRounding | None:
        return None


class GptqReader:
    """A reader of the layers of GPTQ checkpoints (`quant_method: gptq`).

    `qweight` is int32 (in * bits / 32, out), `qzeros` int32 (groups, out * bits / 32), `scales`
    float16 (groups, out), and `g_idx` (in,) has the group of each input. `checkpoint_format: gptq`
    stores zero points minus one, and `gptq_v2` stores them unchanged (GPTQModel `utils/model.py`,
    convert_gptq_v1_to_v2_format).
    """

    names = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, bits: int, zero_offset: int) -> None:
        self.bits, self.zero_offset = bits, zero_offset

    def quantised(self, stored: Stored) -> bool:
        return "qweight" in stored

    def weight(self, stored: Stored) -> Tensor:
        values = unpack_words(stored["qweight"].T.contiguous(), self.bits)  # (out, in)
        scales = stored["scales"].float()
        zeros = unpack_words(stored["qzeros"], self.bits) + self.zero_offset
        size, groups = values.shape[1], len(scales)
        group = stored["g_idx"].long() if "g_idx" in stored else torch.arange(size) // -(-size // groups)
        return (values - zeros[group].T).float() * scales[group].T

    def rounding(self, stored: Stored) -> InputRounding | None:
        return None


class BlockFp8Reader:
    """A reader of FP8 layers with block scales (`quant_method: fp8`).

    DeepSeek-V3 and Qwen3 publish such checkpoints on the Hugging Face hub.

    Weights are E4M3. `weight_scale_inv`, float32 per block of 128 x 128, is the factor of the
    weight, despite its name. Inputs are rounded at run time, per token and 128 inputs (transformers
    `integrations/finegrained_fp8.py`).
    """

    names = frozenset({"weight_scale_inv", "activation_scale", "input_scale"})

    def __init__(self, block: tuple[int, int], static: bool) -> None:
        self.block, self.static = block, static

    def quantised(self, stored: Stored) -> bool:
        return "weight_scale_inv" in stored

    def weight(self, stored: Stored) -> Tensor:
        weight, scale = stored["weight"].float(), stored["weight_scale_inv"].float()
        (rows, columns), (high, wide) = weight.shape, self.block
        whole = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        return weight * whole

    def rounding(self, stored: Stored) -> InputRounding | None:
        if self.static:
            scale = stored.get("activation_scale", stored.get("input_scale"))
            return InputRounding("e4m3", None if scale is None else scale.float())
        return InputRounding("e4m3_block", block=self.block[1])


class CompressedTensorsReader:
    """A reader of the layers of llm-compressor (`quant_method: compressed-tensors`).

    Weights are FP8 or INT8 with `weight_scale` per tensor, output or block, or 4- or 8-bit integers
    in `weight_packed`, packed along the inputs and shifted to be unsigned
    (vllm-project/compressed-tensors `compressors/`).
    """

    names = frozenset({
        "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale",
        "input_zero_point", "k_scale", "v_scale",
    })  # fmt: skip

    def __init__(self, bits: int, input_kind: str | None) -> None:
        self.bits, self.input_kind = bits, input_kind

    def quantised(self, stored: Stored) -> bool:
        return "weight_scale" in stored

    def weight(self, stored: Stored) -> Tensor:
        values, zeros = self._values(stored)
        scales = self._whole(stored["weight_scale"].float(), values, stored)
        if zeros is not None:
            values = values - self._whole(zeros.float(), values, stored)
        return values * scales

    def _values(self, stored: Stored) -> tuple[Tensor, Tensor | None]:
        """Return a layer's unscaled weights, float32 (out, in), and zero points, None without any.

        The zero points have the shape of `weight_scale`.
        """
        zeros = stored.get("weight_zero_point")
        if "weight_packed" not in stored:
            return stored["weight"].float(), zeros
        rows, columns = (int(size) for size in stored["weight_shape"])
        half = 1 << (self.bits - 1)
        values = unpack_words(stored["weight_packed"], self.bits)[:rows, :columns] - half
        # Zero points are packed along the outputs, and weights along the inputs.
        if zeros is not None:
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


_COMPRESSED = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized")
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
    makers = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
    if method not in makers:
        raise _unreadable(f"{method or 'unknown'} weights")
    return makers[method](quantised)


def _unreadable(what: str) -> InputError:
    return InputError(f"{what} cannot be read back, so they cannot be compared with a source; {_INSTEAD}.")


def _modelopt(algorithm: str) -> LayerReader:
    if algorithm and algorithm not in ALGORITHMS:
        raise _unreadable(f"ModelOpt's {algorithm} weights")
    return ModelOptReader(algorithm)


def _fp8(quantised: dict[str, Any]) -> LayerReader:
    # Without a block size, one scale holds for the whole matrix.
    block = quantised.get("weight_block_size") or (1 << 30, 1 << 30)
    return BlockFp8Reader((int(block[0]), int(block[1])), quantised.get("activation_scheme") == "static")


def _awq(quantised: dict[str, Any]) -> LayerReader:
    version, bits = str(quantised.get("version", "gemm")).lower(), quantised.get("bits", quantised.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise _unreadable(f"AWQ weights of version {version} with {bits} bits")
    return AwqReader()


def _gptq(quantised: dict[str, Any]) -> LayerReader:
    bits, layout = quantised.get("bits"), str(quantised.get("checkpoint_format", "gptq"))
    if bits not in (2, 4, 8) or layout not in ("gptq", "gptq_v2"):
        raise _unreadable(f"GPTQ weights of format {layout} with {bits} bits")
    return GptqReader(bits, 1 if layout == "gptq" else 0)


def _compressed(quantised: dict[str, Any]) -> LayerReader:
    groups = [group for group in (quantised.get("config_groups") or {}).values() if isinstance(group, dict)]
    layouts = {str(group.get("format") or quantised.get("format")) for group in groups}
    weights = {(group.get("weights") or {}).get("num_bits") for group in groups}
    plain = not quantised.get("sparsity_config") and not quantised.get("transform_config")
    if not plain or len(weights) != 1 or not layouts <= set(_COMPRESSED):
        raise _unreadable(f"compressed-tensors weights in {', '.join(sorted(layouts)) or 'no format'}")
    inputs = [group.get("input_activations") or {} for group in groups]
    return CompressedTensorsReader(int(weights.pop() or 0), _input_kind(inputs[0]))


def _input_kind(inputs: dict[str, Any]) -> str | None:
    if inputs.get("num_bits") != 8:
        return None
    kind = "e4m3" if inputs.get("type") == "float" else "int8"
    return f"{kind}_token" if inputs.get("dynamic") else kind
