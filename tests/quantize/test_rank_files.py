"""An export equals its source: every rank, dequantised and joined, within the format's own rounding
bound.
"""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from llmops.build.quantize import number_formats
from llmops.build.quantize.embedding_tables import TABLES
from llmops.build.quantize.exported_weights import QuantizedLinear
from llmops.build.quantize.hf_checkpoint_reader import HfCheckpointReader
from llmops.build.quantize.rank_file_reader import RankFileReader

LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 2048,
         "num_hidden_layers": 1}  # fmt: skip
# the same cuts; AWQ's search takes a sixteenth of the time
SMALL = {**LARGE, "hidden_size": 256, "intermediate_size": 512}


def rounding_bound(linear):
    """Return the largest distance that rounding to the stored format moves a value, shape (…, out, in).

    Half a step for integers; for E4M3 half of the last of 3 mantissa bits, or of the smallest subnormal (2**-9).
    """
    weight, scale, prequant = linear.weight, linear.scale, linear.prequant
    value = number_formats.dequantise(weight, scale)
    if scale is None:
        if weight.dtype == torch.bfloat16:
            return value.abs() * 2.0**-8
        # half of float16's smallest subnormal, for values near zero
        return (value.abs() * 2.0**-10).clamp(min=2.0**-25)
    # one step per value: the weight that has 1 in every place
    steps = number_formats.dequantise(*ones_like(weight, scale)).abs().expand_as(value)
    if weight.dtype == torch.float8_e4m3fn:
        # the value before rounding can be a sixteenth larger than the rounded one
        bound = torch.maximum(value.abs() * (2.0**-4 / (1 - 2.0**-4)), steps * 2.0**-10)
    else:
        bound = steps / 2
    if prequant is None:
        return bound
    # the factors themselves are stored in 16 bits
    stored = 2.0**-8 if prequant.dtype == torch.bfloat16 else 2.0**-10
    factors = prequant.float().unsqueeze(-2) if prequant.dim() > 1 else prequant.float()
    return bound * factors.abs() * (1 + stored) + (value * factors).abs() * stored


def ones_like(weight, scale):
    """Return a stored weight of which every value is one step, with its scale."""
    if weight.dtype == torch.float8_e4m3fn:
        return torch.ones(weight.shape).to(weight.dtype), scale
    packed = scale.dim() == weight.dim() and scale.shape[-2] == 2 * weight.shape[-2]
    return torch.full(weight.shape, 0x11 if packed else 1, dtype=weight.dtype), scale


def read_all(reader):
    """Return the weights of an export as they are stored, and `bounds`: how far rounding may have moved each."""
    stored = QuantizedLinear.value

    def read(value):
        with mock.patch.object(QuantizedLinear, "value", value):
            model = reader.layer([f"model.layers.{n}." for n in range(reader.config["num_hidden_layers"])])
            model.weights |= reader.layer([]).weights
            for name in TABLES:
                if (table := reader.table(name)) is not None:
                    model.weights[name] = QuantizedLinear(table.rows(slice(None))).value()
        return model

    exported = read(lambda linear: stored(replace(linear, later_bits=None)))
    return SimpleNamespace(**vars(exported), bounds=read(rounding_bound).weights)


def check_within_bounds(weights, exported, tied=False, float16=False):
    """`float16`: the exporter rounded to float16 first (11 bits, smallest step 2**-24)."""
    skipped = {"lm_head.weight"} if tied else set()
    assert set(exported.weights) - skipped == set(weights) - skipped
    for name, tensor in exported.weights.items():
        assert tensor.shape == weights[name].shape, name
        excess = (tensor - weights[name]).abs() - exported.bounds[name] * (1 + 1e-4) - 1e-9
        if float16:
            excess -= (weights[name].abs() * 2.0**-11).clamp(min=2.0**-25) * 1.1
        assert float(excess.max()) <= 0, name
        if tensor.dim() > 1:  # and the bound is not so wide that anything would fit
            assert float(exported.bounds[name].mean()) < 0.3 * float(weights[name].abs().mean()), name


@pytest.mark.parametrize(("family", "sizes"), [("llama", LARGE), ("qwen2", SMALL), ("mixtral", SMALL)])
def test_fp8_on_eight_gpus(export, family, sizes):
    weights, folder, _ = export(family, "fp8", tp=8, **sizes)
    assert len(list(folder.glob("rank*.safetensors"))) == 8
    check_within_bounds(weights, read_all(RankFileReader(folder, family)))


@pytest.mark.parametrize(
    ("family", "sizes", "group"), [("llama", LARGE, 128), ("qwen2", SMALL, 32), ("mixtral", SMALL, 32)]
)
def test_int4_awq_on_eight_gpus(export, family, sizes, group):
    weights, folder, _ = export(family, "int4_awq", tp=8, group=group, **sizes)
    check_within_bounds(weights, read_all(RankFileReader(folder, family)))


def test_pipeline_stages_and_kv_heads_on_two_gpus_each(export):
    weights, folder, _ = export("llama", "fp8", tp=2, pp=2, kv="fp8")
    files = RankFileReader(folder, "llama")
    exported = read_all(files)
    check_within_bounds(weights, exported)
    assert files.config["mapping"] == {"world_size": 4, "tp_size": 2, "pp_size": 2, "cp_size": 1}
    assert files.config["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert len(exported.kv_scales) == 4


class Rope(dict):
    """Parameters that `export` can keep a model by."""

    def __hash__(self):
        return hash(self["rope_type"])


def test_rope_reaches_the_engine(export):
    """transformers 5 keeps it in rope_parameters, where ModelOpt's exporter does not look."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 256}  # fmt: skip

    _, folder, _ = export("llama", "fp8", rope_parameters=Rope(rope))
    config = json.loads((folder / "config.json").read_text())
    scaling = config["rotary_scaling"]
    assert (config["rotary_base"], scaling["factor"], scaling["rope_type"]) == (500000.0, 8.0, "llama3")


def test_scaling_beyond_the_models_context_is_left_out(export):
    """trtllm-build wants an `alpha` of it (KeyError), and within max_position_embeddings it changes nothing."""
    rope = Rope(rope_type="dynamic", rope_theta=10000.0, factor=4.0)
    _, folder, _ = export("llama", "fp8", rope_parameters=rope)
    assert json.loads((folder / "config.json").read_text())["rotary_scaling"] is None


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2", "qwen3_moe", "gemma3", "phi3"])
def test_hugging_face_export(export, family):
    weights, folder, _ = export(family, "fp8", target="pytorch", kv="fp8")
    exported = read_all(HfCheckpointReader(folder))
    check_within_bounds(weights, exported, tied=family.startswith("gemma"), float16=True)
    # `_torch/attention_backend/trtllm.py`: "fp8 KV-cache scales. Stay at 1.0 (no-op) for the PyTorch backend, which
    # never overrides them"
    assert {(kind, float(scale)) for kind, scale in exported.kv_scales.values()} == {("e4m3", 1.0)}
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] > 0  # where transformers 4, which TensorRT-LLM 1.2 has, looks for it
    assert (config["torch_dtype"], config["quantization_config"]["quant_algo"]) == ("float16", "FP8")


def test_int8_weights_as_the_pytorch_backend_loads_them(export):
    """`WeightOnlyQuantLinearMethod` of `tensorrt_llm/_torch/modules/linear.py`: an INT8 weight (out, in), which it
    transposes and packs itself, and one `weight_scale` per output; packing wants inputs by 64 and outputs by 8."""
    from safetensors.torch import load_file

    _, folder, _ = export("llama", "int8_wo", target="pytorch")
    assert json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "W8A16"
    tensors = load_file(next(folder.glob("*.safetensors")))
    linears = [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]
    assert len(linears) == 2 * 7
    for name in linears:
        outputs, inputs = tensors[name].shape
        assert (tensors[name].dtype.itemsize, tensors[f"{name}_scale"].shape) == (1, (outputs,))
        assert inputs % 64 == outputs % 8 == 0
