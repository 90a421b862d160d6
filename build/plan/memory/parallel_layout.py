"""Layouts of a model over GPUs, and rules that reject the layouts that TensorRT-LLM cannot run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpu_specs import GpuSpec
from llmops.build.quant_formats import PER_CHANNEL, QuantFormat, missing_kernels, missing_kv_kernels

#: Tensor- and pipeline-parallel sizes that the search tries: powers of two up to one node of GPUs.
SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class ParallelLayout:
    """The parallel layout of one replica.

    `tp` is the number of ranks that split each layer, `pp` the number of stages that split the list
    of layers, and `ep` the number of ranks, of the `tp`, over which experts are distributed.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of a replica."""
        return self.tp * self.pp

    @property
    def moe_tp(self) -> int:
        """Return the number of ranks that split each expert: `tp` divided by `ep`."""
        return self.tp // self.ep

    def stage_layers(self, num_layers: int, stage: int) -> int:
        """Return the number of layers of a pipeline stage.

        The first stages get the remaining layers, as in TensorRT-LLM's mapping.
        """
        base, rest = divmod(num_layers, self.pp)
        return base + (stage < rest)

    def stage_range(self, num_layers: int, stage: int) -> range:
        """Return the range of indices of a pipeline stage's layers."""
        first = sum(self.stage_layers(num_layers, earlier) for earlier in range(stage))
        return range(first, first + self.stage_layers(num_layers, stage))

    def most_layers(self, num_layers: int, has: Callable[[int], bool]) -> int:
        """Return the largest number of layers on one pipeline stage for which `has` is True."""
        return max(sum(map(has, self.stage_range(num_layers, stage))) for stage in range(self.pp))

    def __str__(self) -> str:
        parts = [f"TP{self.tp}"]
        if self.pp > 1:
            parts.append(f"PP{self.pp}")
        if self.ep > 1:
            parts.append(f"EP{self.ep}")
        return " ".join(parts)


def local_kv_heads(model: Architecture, tp: int) -> int:
    """Return the number of KV heads on one rank. More ranks than heads replicate the heads."""
    return -(-model.num_kv_heads // tp)


def candidate_layouts(model: Architecture, tp: int | None, pp: int | None, ep: int | None) -> Iterator[ParallelLayout]:
    """Yield every layout to try.

    `tp`, `pp` and `ep` are the sizes that the user gave. For a given size, only this size is tried.
    """
    for tensor in [tp] if tp else SIZES:
        for stages in [pp] if pp else SIZES:
            experts = [ep] if ep else sorted({1, tensor}) if model.moe else [1]
            for expert in experts:
                yield ParallelLayout(tensor, stages, expert)


def layout_problem(
    model: Architecture, precision: QuantFormat, gpu: GpuSpec, layout: ParallelLayout, kv: str = "bf16"
) -> str | None:
    """Return the reason for which TensorRT-LLM cannot run the layout, or None.

    `kv` is the dtype of the KV cache.
    """
    return (
        _hardware(model, precision, gpu, layout, kv)
        or _heads(model, layout)
        or _sizes(model, layout)
        or _experts(model, layout)
        or _groups(model, precision, layout)
    )


def _hardware(model: Architecture, precision: QuantFormat, gpu: GpuSpec, layout: ParallelLayout, kv: str) -> str | None:
    if gpu.sm < precision.sm:
        return f"{precision.name} needs SM{precision.sm}; {gpu.name} is SM{gpu.sm}"
    if missing := missing_kernels(precision, gpu.sm, model.moe is not None, model.mla is not None):
        return f"TensorRT-LLM has no kernels for {missing} on {gpu.name}"
    if missing := missing_kv_kernels(kv, gpu.sm, model.head_dim, model.family):
        return f"TensorRT-LLM has no {missing} on {gpu.name}; use --kv-dtype bf16"
    if layout.tp > gpu.per_node:
        return f"tensor parallelism over {layout.tp} GPUs does not fit a node of {gpu.per_node}"
    return None


def _heads(model: Architecture, layout: ParallelLayout) -> str | None:
    if model.num_heads % layout.tp:
        return f"{model.num_heads} attention heads are not divisible by tp {layout.tp}"
    kv, tp = model.num_kv_heads, layout.tp
    if model.mla is None and kv % tp and tp % kv:
        return f"neither of {kv} KV heads and tp {tp} divides the other"
    if model.recurrent and model.recurrent.groups % tp:
        return f"{model.recurrent.groups} key heads or groups of recurrent layers are not divisible by tp {tp}"
    return None


def _sizes(model: Architecture, layout: ParallelLayout) -> str | None:
    if layout.pp > model.num_layers:
        return f"{layout.pp} pipeline stages are more than the {model.num_layers} layers"
    if layout.tp % layout.ep:
        return f"ep {layout.ep} does not divide tp {layout.tp}"
    if model.has_dense_layers and model.intermediate_size % layout.tp:
        return f"intermediate_size {model.intermediate_size} is not divisible by tp {layout.tp}"
    return None


def _experts(model: Architecture, layout: ParallelLayout) -> str | None:
    if model.moe is None:
        return "a dense model has no experts to split" if layout.ep > 1 else None
    if model.moe.num_experts % layout.ep:
        return f"{model.moe.num_experts} experts are not divisible by ep {layout.ep}"
    if model.moe.moe_intermediate_size % layout.moe_tp:
        return f"expert size {model.moe.moe_intermediate_size} is not divisible by moe_tp {layout.moe_tp}"
    return None


def _groups(model: Architecture, precision: QuantFormat, layout: ParallelLayout) -> str | None:
    """Return a reason if ranks would split a group of quantised weights, or None.

    In a row-parallel layer, the weights of a group share one scale.
    """
    size = precision.block or (precision.group if precision.group != PER_CHANNEL else None)
    if size is None:
        return None
    for name, width in _row_inputs(model, precision, layout):
        if width % size:
            return f"{name} of a rank is {width}, which is not a multiple of {precision.name}'s group of {size}"
    return None


def _row_inputs(model: Architecture, precision: QuantFormat, layout: ParallelLayout) -> Iterator[tuple[str, int]]:
    if "attention" in precision.parts:
        value_dim = model.mla.v_head_dim if model.mla else model.head_dim
        yield "the attention output", model.num_heads * value_dim // layout.tp
    if "mlp" in precision.parts and model.has_dense_layers:
        yield "intermediate_size", model.intermediate_size // layout.tp
    if model.moe and "experts" in precision.parts:
        yield "the expert size", model.moe.moe_intermediate_size // layout.moe_tp
