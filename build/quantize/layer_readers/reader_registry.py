"""Which reader a checkpoint needs, from its config.json and hf_quant_config.json."""

from __future__ import annotations

from typing import Any

from llmops.build.quantize.layer_readers.awq import AwqReader
from llmops.build.quantize.layer_readers.block_fp8 import BlockFp8Reader
from llmops.build.quantize.layer_readers.compressed_tensors import CompressedTensorsReader
from llmops.build.quantize.layer_readers.gptq import GptqReader
from llmops.build.quantize.layer_readers.modelopt import ALGORITHMS, ModelOptReader
from llmops.build.quantize.layer_readers.reader_interface import LayerReader
from llmops.errors import InputError

_COMPRESSED = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized")
_INSTEAD = "measure the served model instead (`llmops bench`, your own evaluation)"


def reader_of(config: dict[str, Any], modelopt: dict[str, Any]) -> LayerReader:
    """`modelopt` is the "quantization" of hf_quant_config.json, empty where there is none. Raises InputError for what
    cannot be read."""
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
    block = quantised.get("weight_block_size") or (1 << 30, 1 << 30)  # one scale for all
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
