"""Check that weights can be split into tp parts, and choose the AWQ group size, before any work.

ModelOpt and TensorRT-LLM require that every split dimension is divisible by tp, and a
group-quantised input dimension by tp * group (NVIDIA/TensorRT-LLM
`tensorrt_llm/_torch/modules/linear.py`, ModelOpt `export/postprocess.py`).

For some formats, an engine rounds both widths of a matrix up to a multiple of tp times the group
size, and at least of tp times 64. The widths in the checkpoint are not rounded up, so they must be
such multiples. The formats are 4-bit weights, and 8-bit weights that trtllm-build quantises
(`tensorrt_llm/quantization/layers.py`, WeightOnlyQuantLinear and WeightOnlyGroupwiseQuantLinear).
The argument `rounded` is True for these formats.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from llmops.build.model.architecture import Architecture
from llmops.errors import InputError

#: Smallest unit, per GPU, to which an engine's weight-only layers round their widths up.
_LEAST_UNIT = 64
#: Tensor-parallel sizes that error messages may suggest.
TP_SIZES = range(1, 17)


@dataclass(frozen=True)
class ShardedLinear:
    """A weight (out, in), and the dimension that tensor parallelism splits."""

    name: str
    out_features: int
    in_features: int
    cut: str  # "out" (column parallel) or "in" (row parallel)

    def local_in(self, tp: int) -> int:
        """Return the number of input features per GPU."""
        return self.in_features // tp if self.cut == "in" else self.in_features

    def divides(self, tp: int) -> bool:
        """Return True if the split dimension is divisible by tp."""
        return (self.in_features if self.cut == "in" else self.out_features) % tp == 0


def linears(arch: Architecture) -> Iterator[ShardedLinear]:
    """Yield the quantised weights of one layer, in Hugging Face names."""
    hidden, heads, head_dim = arch.hidden_size, arch.num_heads, arch.head_dim
    yield ShardedLinear("self_attn.q_proj", heads * head_dim, hidden, "out")
    yield ShardedLinear("self_attn.o_proj", hidden, heads * head_dim, "in")
    if arch.moe is None or len(arch.moe.layers) < arch.num_layers:
        yield ShardedLinear("mlp.gate_proj", arch.intermediate_size, hidden, "out")
        yield ShardedLinear("mlp.down_proj", hidden, arch.intermediate_size, "in")
    if arch.moe is not None:
        width = arch.moe.moe_intermediate_size
        yield ShardedLinear("mlp.experts.gate_proj", width, hidden, "out")
        yield ShardedLinear("mlp.experts.down_proj", hidden, width, "in")


def sharding_problem(arch: Architecture, tp: int, group_size: int | None, rounded: bool = False) -> str | None:
    """Return the reason for which `tp` cannot work, with layer and dimension, or None.

    Args:
        arch: The architecture of the model.
        tp: The number of ranks that split each layer.
        group_size: The number of weights that share a scale, which is checked too, or None.
        rounded: True for formats whose engines round the widths of matrices up. The widths must
            then be multiples of the unit, because those in the checkpoint are not rounded up.
    """
    if arch.num_heads % tp:
        return f"num_attention_heads {arch.num_heads} does not divide by tp {tp}"
    if arch.num_kv_heads % tp and tp % arch.num_kv_heads:
        return f"num_key_value_heads {arch.num_kv_heads} neither divides by tp {tp} nor divides it"
    for linear in linears(arch):
        cut = linear.in_features if linear.cut == "in" else linear.out_features
        if not linear.divides(tp):
            return f"{linear.name} has {cut} {linear.cut}put features, which do not divide by tp {tp}"
        local = linear.local_in(tp)
        if group_size and local % group_size:
            share = f"{local} of {linear.in_features}" if local != linear.in_features else f"{local}"
            return f"{linear.name} has {share} input features per GPU, which do not divide by group size {group_size}"
    return _rounding_problem(arch, tp, max(_LEAST_UNIT, group_size or 0) * tp) if rounded else None


def _rounding_problem(arch: Architecture, tp: int, unit: int) -> str | None:
    # An engine has one matrix of queries, keys and values, with at least one KV head per rank.
    qkv = (arch.num_heads + 2 * max(arch.num_kv_heads, tp)) * arch.head_dim
    widths = {"self_attn.q_proj, k_proj and v_proj together": qkv}
    for linear in linears(arch):
        if "experts" not in linear.name:
            widths |= {f"{linear.name} (in)": linear.in_features, f"{linear.name} (out)": linear.out_features}
    del widths["self_attn.q_proj (out)"]
    for name, width in widths.items():
        if width % unit:
            return f"{name} has {width} features, which an engine of this format needs in multiples of {unit}"
    return None


def choose_group_size(
    arch: Architecture, tp: int, requested: int | None, sizes: tuple[int, ...], rounded: bool = False
) -> int:
    """Return the first of `sizes` that divides every split input, or the requested size.

    `sharding_problem` explains `rounded`.

    Raises:
        InputError: No size divides every split input, or the requested size does not.
    """
    if requested and requested not in sizes:
        raise InputError(
            f"--group-size {requested}: TensorRT-LLM has kernels for {' and '.join(map(str, sizes))} only; use one of "
            "these."
        )
    for group in (requested,) if requested else sizes:
        if sharding_problem(arch, tp, group, rounded) is None:
            return group
    raise InputError(_no_group(arch, tp, requested, sizes, rounded))


def check_sharding(arch: Architecture, tp: int, pp: int, group_size: int | None = None, rounded: bool = False) -> None:
    """Check that `tp` and `pp` can split the model.

    `sharding_problem` explains the other arguments.

    Raises:
        InputError: A dimension is not divisible. The message has the dimension and the values that
            would work.
    """
    reason = sharding_problem(arch, tp, group_size, rounded)
    if reason is not None:
        raise InputError(f"--tp {tp} cannot work: {reason}; {_tp_values(arch, group_size, rounded)}.")
    if pp > arch.num_layers:
        raise InputError(f"--pp {pp} is more than the {arch.num_layers} layers; give a smaller --pp.")
    if arch.num_layers % pp:
        raise InputError(f"--pp {pp} cannot work: ModelOpt splits {arch.num_layers} layers into equal stages only.")


def _no_group(arch: Architecture, tp: int, requested: int | None, sizes: tuple[int, ...], rounded: bool) -> str:
    group = requested or sizes[-1]
    fitting = [g for g in sizes if sharding_problem(arch, tp, g, rounded) is None]
    what = f"--group-size {requested} with --tp {tp}" if requested else f"--tp {tp} with group-wise quantisation"
    reason = f"{what} cannot work: {sharding_problem(arch, tp, group, rounded)}"
    if not fitting:
        return f"{reason}; {_tp_values(arch, group, rounded)}."
    return f"{reason}; --group-size {' or '.join(map(str, fitting))} would do with --tp {tp}."


def _tp_values(arch: Architecture, group_size: int | None, rounded: bool) -> str:
    good = [str(tp) for tp in TP_SIZES if sharding_problem(arch, tp, group_size, rounded) is None]
    with_group = f" with group size {group_size}" if group_size else ""
    return f"tp {', '.join(good)} would do{with_group}" if good else f"no tp would do{with_group}; use --quant fp8"
