"""The tensors that TensorRT-LLM 1.2.1 must find in `rank{N}.safetensors`, by name and shape, as data.

Sources, in `tensorrt_llm/`: the parameters that `models/{llama,qwen,gemma,phi3}/model.py`, `layers/{attention,mlp,moe,
linear}.py` and `quantization/layers.py` declare; the modules that `quantization/quantize.py` (quantize_layers) leaves
alone when the checkpoint names none: `*lm_head`, `*router`, `*vocab_embedding`, …; and what `models/modeling_utils.py`
(preprocess_weights) makes of a file before it compares: it packs AWQ weights, quantises W8A16 and W4A16, derives
`kv_cache_rcp_scaling_factor`, folds the two factors of W4A8, and lets a missing `lm_head.weight` be the embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

Shape = tuple[int, ...]
# quantization.exclude_modules where the checkpoint has none
EXCLUDED = ("*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding", "*shared_expert_gate")
TWO_NORMS = ("input_layernorm", "post_layernorm")
FOUR_NORMS = (*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
HEAD_NORMS = ("attention.q_layernorm", "attention.k_layernorm")


@dataclass(frozen=True)
class Kind:
    """The features of a family. `fused_mlp`: gate and up are one matrix `fc`."""

    norms: tuple[str, ...] = TWO_NORMS
    head_norms: bool = False
    qkv_bias: bool = False
    fused_mlp: bool = False
    moe: bool = False
    shared_embedding: bool = False


KINDS = {
    "llama": Kind(), "mistral": Kind(), "mixtral": Kind(moe=True), "qwen2": Kind(qkv_bias=True),
    "qwen3": Kind(head_norms=True), "qwen3_moe": Kind(head_norms=True, moe=True),
    "gemma2": Kind(norms=FOUR_NORMS, shared_embedding=True),
    "gemma3": Kind(norms=FOUR_NORMS, head_norms=True, shared_embedding=True), "phi3": Kind(fused_mlp=True),
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The sizes of the whole model; `group` inputs share a scale in AWQ."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    experts: int = 0
    group: int = 0


def linear(algorithm: str | None, out: int, inp: int, group: int, experts: int) -> dict[str, Shape]:
    """suffix -> shape of one quantised linear layer of a rank, or of all its experts."""
    stack = (experts,) if experts else ()
    whole, one = {"weight": (*stack, out, inp)}, (1,)
    packed = {"weight": (*stack, out // 2, inp), "weights_scaling_factor": (*stack, out, inp // max(group, 1)),
              "prequant_scaling_factor": (*stack, inp)}  # fmt: skip
    return {
        None: whole,
        "W8A16": whole,
        "W4A16": whole,
        "FP8": {**whole, "activation_scaling_factor": one, "weights_scaling_factor": (*stack, 1)},
        "FP8_PER_CHANNEL_PER_TOKEN": {**whole, "per_channel_scale": (*stack, out)},
        "W4A16_AWQ": packed,
        "W4A8_AWQ": {**packed, "activation_scaling_factor": one, "weights_scaling_factor_2": one},
        "W8A8_SQ_PER_CHANNEL": {**whole, "activation_scaling_factor": one, "weights_scaling_factor": (*stack, out),
                                "prequant_scaling_factor": (*stack, inp)},
    }[algorithm]  # fmt: skip


def modules(kind: Kind, sizes: Sizes, tp: int) -> Iterator[tuple[str, int, int, int]]:
    """(name, outputs, inputs, experts) of the linear layers of one decoder layer on one rank."""
    query, key = sizes.heads // tp * sizes.head, max(1, sizes.kv_heads // tp) * sizes.head
    yield "attention.qkv", query + 2 * key, sizes.hidden, 0
    yield "attention.dense", sizes.hidden, query, 0
    width = sizes.intermediate // tp
    joined = kind.fused_mlp or kind.moe
    yield "mlp.fc", width * (2 if joined else 1), sizes.hidden, sizes.experts
    yield "mlp.proj", sizes.hidden, width, sizes.experts
    if not joined:
        yield "mlp.gate", width, sizes.hidden, 0
    if kind.moe:
        yield "mlp.router", sizes.experts, sizes.hidden, 0


def layer(kind: Kind, sizes: Sizes, algorithm: str | None, kv: str | None, tp: int) -> Iterator[tuple[str, Shape]]:
    for name in kind.norms:
        yield f"{name}.weight", (sizes.hidden,)
    for name in HEAD_NORMS if kind.head_norms else ():
        yield f"{name}.weight", (sizes.head,)
    for name, out, inp, experts in modules(kind, sizes, tp):
        kept = any(fnmatchcase(name, pattern) for pattern in EXCLUDED)
        for suffix, shape in linear(None if kept else algorithm, out, inp, sizes.group, experts).items():
            yield f"{name}.{suffix}", shape
        if name == "attention.qkv" and kind.qkv_bias:
            yield f"{name}.bias", (out,)
    if kv:
        yield "attention.kv_cache_scaling_factor", (1,)


def required(
    family: str, sizes: Sizes, algorithm: str | None, kv: str | None, tp: int, pp: int, rank: int
) -> dict[str, Shape]:
    """name -> shape for one rank. Layers are numbered within their pipeline stage."""
    kind, stage = KINDS[family], rank // tp
    found: dict[str, Shape] = {}
    table = (-(-sizes.vocab // tp), sizes.hidden)
    for number in range(sizes.layers // pp):
        prefix = f"transformer.layers.{number}."
        found |= {prefix + name: shape for name, shape in layer(kind, sizes, algorithm, kv, tp)}
    if stage == 0:
        found["transformer.vocab_embedding.weight"] = table
    if stage == pp - 1:
        found["transformer.ln_f.weight"] = (sizes.hidden,)
        if not (kind.shared_embedding and stage == 0):
            found["lm_head.weight"] = table
    return found


#: Endings of tensors that are factors, and so positive numbers.
SCALES = ("scaling_factor", "per_channel_scale", "weights_scaling_factor_2")
_NARROW = {"FP8": {"float8_e4m3fn"}, "FP8_PER_CHANNEL_PER_TOKEN": {"float8_e4m3fn"}, "W8A8_SQ_PER_CHANNEL": {"int8"},
           "W4A16_AWQ": {"int8", "uint8"}, "W4A8_AWQ": {"int8", "uint8"}}  # fmt: skip


def dtypes(name: str, algorithm: str | None, dtype: str) -> set[str]:
    """Return the dtypes that a tensor may have: `quantization/layers.py` declares the weights of a quantised layer
    narrow, factors of 8-bit formats in float32 and those of groups in the model's dtype."""
    module, _, suffix = name.rpartition(".")
    if suffix.endswith(SCALES):
        return {"float32", dtype}
    if module.endswith("router"):
        return {"float32"}  # `layers/moe.py`, MixtureOfExperts: the router is computed in float32
    linear = module.startswith("transformer.layers.") and not module.endswith("layernorm")
    quantised = suffix == "weight" and linear
    return _NARROW.get(str(algorithm), {dtype}) if quantised else {dtype}
