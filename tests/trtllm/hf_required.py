"""The tensors that TensorRT-LLM's PyTorch backend reads of a quantised Hugging Face checkpoint, as data.

Files are of NVIDIA/TensorRT-LLM below `tensorrt_llm/_torch/`, read on 2026-11-23 in stored versions: LINEAR in two
(90,930 characters, of autumn 2025; 118,156 characters, after #8432), which agree but for the cut of W4A16's scales over
GPUs, EXPERTS in two (134,887 and 316,437 characters), PHI3 in the newest (after #6761). The loaders that raise are the
rule: a missing name is a KeyError there, another shape an error of `copy_`, another value an assertion.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LINEAR = "modules/linear.py"
EXPERTS = "modules/fused_moe/quantization.py"
PHI3 = "models/modeling_phi3.py"
CONFIG = "../llmapi/llm_utils.py"

#: Per QuantAlgo, the class whose `create_weights` and `load_weights_*` were read.
SOURCES = {
    None: f"{LINEAR} UnquantizedLinearMethod",
    "FP8": f"{LINEAR} FP8QDQLinearMethod; {EXPERTS} FP8QDQFusedMoEMethod",
    "FP8_PER_CHANNEL_PER_TOKEN": f"{LINEAR} FP8RowwiseLinearMethod",
    "W8A16": f"{LINEAR} WeightOnlyQuantLinearMethod",
    "W4A16_AWQ": f"{LINEAR} W4A16_AWQ_LinearMethod",
    "W4A8_AWQ": f"{LINEAR} W4A8_AWQ_LinearMethod; {EXPERTS} WInt4AFP8FusedMoEMethod",
}
#: Fields of QuantConfig (`models/modeling_utils.py` at 1.2.1). The loader sets each key of the file on it, and a key
#: that it lacks raises.
QUANT_CONFIG = {"quant_algo", "kv_cache_quant_algo", "group_size", "smoothquant_val", "clamp_val", "use_meta_recipe",
                "has_zero_point", "pre_quant_scale", "exclude_modules"}  # fmt: skip
_EXPERT_NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
                 "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """One tensor of the checkpoint: its shape, torch's name of its dtype, and the tensor itself."""

    shape: tuple[int, ...]
    dtype: str
    value: Any


@dataclass(frozen=True)
class Linear:
    """A weight as the loader meets it. `group` are the modules that become one matrix with it: q with k and v, gate
    with up. `cut` is the dimension that tensor parallelism divides: 0 outputs, 1 inputs."""

    name: str
    out: int
    inputs: int
    group: tuple[str, ...] = ()
    cut: int = 0
    expert: bool = False
    bias: bool = False


def linears(family: str, config: Mapping[str, Any]) -> Iterator[Linear]:
    """Yield every quantised matrix of the checkpoint, by its name in the file."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        if family == "phi3":
            yield Linear(f"{attention}.qkv_proj", (heads + 2 * kv_heads) * head, hidden)
        else:
            names = tuple(f"{attention}.{one}_proj" for one in "qkv")
            for name, count in zip(names, (heads, kv_heads, kv_heads), strict=True):
                yield Linear(name, count * head, hidden, names, bias=family == "qwen2")
        yield Linear(f"{attention}.o_proj", hidden, heads * head, cut=1)
        yield from _mlp(family, config, layer, hidden)


def _mlp(family: str, config: Mapping[str, Any], layer: str, hidden: int) -> Iterator[Linear]:
    width = config["intermediate_size"]
    if family == "phi3":
        yield Linear(f"{layer}.mlp.gate_up_proj", 2 * width, hidden)
        yield Linear(f"{layer}.mlp.down_proj", hidden, width, cut=1)
        return
    block, gate, up, down = _EXPERT_NAMES.get(family, ("mlp", "gate_proj", "up_proj", "down_proj"))
    experts = config.get("num_local_experts") or config.get("num_experts")
    if family in _EXPERT_NAMES:
        width = config.get("moe_intermediate_size") or width
        modules = [f"{layer}.{block}.experts.{number}" for number in range(experts)]
    else:
        modules = [f"{layer}.mlp"]
    for module in modules:
        pair = (f"{module}.{gate}", f"{module}.{up}")
        for name in pair:
            yield Linear(name, width, hidden, pair, expert=family in _EXPERT_NAMES)
        yield Linear(f"{module}.{down}", hidden, width, cut=1, expert=family in _EXPERT_NAMES)


def wanted(algorithm: str | None, linear: Linear, group_size: int, dtype: str) -> dict[str, tuple[Any, set[str]]]:
    """Return suffix -> (shape, dtypes) of one matrix. A shape of None is any tensor of one element."""
    rows, inputs = linear.out, linear.inputs
    whole = (rows, inputs)
    narrow, scale, one = {"float8_e4m3fn"}, {"float32"}, (None, {"float32"})
    packed = {"weight": ((rows // 2, inputs), {"uint8", "int8"}),
              "weight_scale": ((rows, inputs // max(group_size, 1)), {"float32", "float16", "bfloat16"})}  # fmt: skip
    # Fused matrices have their input factors folded into the norm before; the loader of W4A16 would drop them.
    if not linear.group or linear.expert:
        packed["pre_quant_scale"] = ((inputs,), {dtype})
    four_bits_for_fp8 = {**packed, "input_scale": one, "weight_scale_2": one}
    found: dict[str, tuple[Any, set[str]]] = {
        None: {"weight": (whole, {dtype})},
        "FP8": {"weight": (whole, narrow), "weight_scale": one, "input_scale": one},
        "FP8_PER_CHANNEL_PER_TOKEN": {"weight": (whole, narrow), "weight_scale": ((rows,), scale)},
        "W8A16": {"weight": (whole, {"int8", "uint8"}), "weight_scale": ((rows,), {"float32", dtype})},
        # CutlassFusedMoE._get_quant_method: every per-group INT4 is WInt4AFP8FusedMoEMethod's
        "W4A16_AWQ": four_bits_for_fp8 if linear.expert else packed,
        "W4A8_AWQ": four_bits_for_fp8,
    }[algorithm]  # fmt: skip
    return {**found, "bias": ((rows,), {dtype})} if linear.bias else found


def faults(
    family: str, config: Mapping[str, Any], quantisation: Mapping[str, Any] | None, tensors: Mapping[str, Stored],
    tp: int,
) -> list[str]:  # fmt: skip
    """Return what the loader would raise for, or load wrongly, each with the place in it."""
    algorithm = quantisation.get("quant_algo") if quantisation else None
    found = list(_config(quantisation))
    if family in _EXPERT_NAMES and algorithm == "W4A8_AWQ" and config.get("torch_dtype") != "bfloat16":
        found.append(
            f"experts: scales in bfloat16 are read as {config.get('torch_dtype')} ({EXPERTS} load_quant_scales)"
        )
    if family in _EXPERT_NAMES and algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        found.append("experts: Unsupported quantization mode (modules/fused_moe/fused_moe_cutlass.py)")
    if algorithm not in SOURCES:
        return [*found, f"{algorithm}: no rule"]
    size, dtype = (quantisation or {}).get("group_size") or 0, str(config.get("torch_dtype") or config["dtype"])
    listed = list(linears(family, config))
    for linear in listed:
        for suffix, (shape, dtypes) in wanted(algorithm, linear, size, dtype).items():
            found += _tensor(tensors.get(f"{linear.name}.{suffix}"), f"{linear.name}.{suffix}", shape, dtypes)
        found += _surplus(algorithm, linear, tensors)
        found += _cut(algorithm, linear, size, tp)
        if family == "phi3" and linear.name.endswith(("qkv_proj", "gate_up_proj")):
            found += _split(algorithm, linear)
        if not found:
            found += _alike(algorithm, linear, tensors)
    if not found and quantisation:
        found += _excluded({one.name for one in listed}, quantisation, tensors)
    return found


def _config(quantisation: Mapping[str, Any] | None) -> Iterator[str]:
    if quantisation is None:
        return
    if not quantisation.get("quant_algo"):
        yield f"no quant_algo ({CONFIG} _update_from_hf_quant_config)"
    if unknown := set(quantisation) - QUANT_CONFIG:
        yield f"QuantConfig has no {', '.join(sorted(unknown))} ({CONFIG} _update_from_hf_quant_config)"
    if quantisation.get("kv_cache_quant_algo") not in (None, "FP8", "NVFP4"):
        yield f"kv_cache_quant_algo {quantisation['kv_cache_quant_algo']} ({CONFIG} _update_from_hf_quant_config)"


def _tensor(tensor: Stored | None, name: str, shape: tuple[int, ...] | None, dtypes: set[str]) -> Iterator[str]:
    if tensor is None:
        yield f"{name} is missing ({LINEAR})"
        return
    if (math.prod(tensor.shape) != 1) if shape is None else (tensor.shape != shape):
        yield f"{name} is {tensor.shape}, not {shape or 'one element'} ({LINEAR})"
    if tensor.dtype not in dtypes:
        yield f"{name} is {tensor.dtype}, not {' or '.join(sorted(dtypes))} ({LINEAR})"
    values = tensor.value.float()
    if "scale" in name and not bool((values.isfinite() & (values > 0)).all()):
        yield f"{name} has a scale that is not a positive number"


def _split(algorithm: str | None, linear: Linear) -> Iterator[str]:
    """Phi-3's loader splits the packed matrices by rows, and their scales by rows of a table of two dimensions."""
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ"):
        yield f"{linear.name}.weight: rows of two weights are split as rows of one ({PHI3} load_weights)"
    if algorithm in ("FP8_PER_CHANNEL_PER_TOKEN", "W8A16"):
        yield f"{linear.name}.weight_scale: too many indices for one dimension ({PHI3} load_weights)"


def _surplus(algorithm: str | None, linear: Linear, tensors: Mapping[str, Stored]) -> Iterator[str]:
    """Factors that the loader would drop without a word."""
    if algorithm == "W4A16_AWQ" and linear.group and not linear.expert and f"{linear.name}.pre_quant_scale" in tensors:
        yield f"{linear.name}.pre_quant_scale is dropped ({LINEAR} W4A16_AWQ_LinearMethod)"


def _cut(algorithm: str | None, linear: Linear, size: int, tp: int) -> Iterator[str]:
    """Each GPU takes an equal share of every tensor (`load_weight_shard`)."""
    rows, inputs = linear.out, linear.inputs
    parts = [rows if linear.cut == 0 else inputs]
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ"):
        parts.append(rows // 2 if linear.cut == 0 else inputs // size)
        share = inputs // tp if linear.cut else inputs
        if share % size:
            yield f"{linear.name}: {share} inputs do not divide by the group of {size} ({LINEAR} create_weights)"
        if linear.expert and share % 128:
            yield f"{linear.name}: K shape is required to be multiple of 128, received {share} ({EXPERTS})"
    if any(part % tp for part in parts):
        yield f"{linear.name} does not divide by {tp}"


def _alike(algorithm: str | None, linear: Linear, tensors: Mapping[str, Stored]) -> Iterator[str]:
    """Check that layers which become one matrix share these (`load_weight_scales_w4a8` asserts it,
    experts take the largest).
    """
    shared = {"W4A8_AWQ": ("pre_quant_scale",) if linear.expert else ("input_scale", "weight_scale_2")}
    for suffix in shared.get(str(algorithm), ()):
        values = [tensors[f"{name}.{suffix}"].value for name in linear.group]
        if any(not bool((value == values[0]).all()) for value in values[1:]):
            yield f"{linear.name}.{suffix} differs within {', '.join(linear.group)}"


def _excluded(quantised: set[str], quantisation: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Iterator[str]:
    """A linear layer that has no scales must be named, or the loader makes a quantised one of it: the output matrix and
    the routers. Embeddings and norms are no linear layers."""
    plain = {name.removesuffix(".weight") for name, one in tensors.items() if name.endswith(".weight")
             and len(one.shape) == 2 and name.removesuffix(".weight") not in quantised}  # fmt: skip
    for module in sorted(plain - {"model.embed_tokens"} - set(quantisation.get("exclude_modules") or ())):
        yield f"{module} is neither quantised nor in exclude_modules ({LINEAR} get_quant_method)"
