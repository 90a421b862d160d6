"""Layouts of a model over GPUs, and the rules that reject layouts TensorRT-LLM cannot run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpu_specs import GpuSpec
from llmops.build.quant_formats import PER_CHANNEL, QuantFormat

#: Tensor- and pipeline-parallel sizes that the search tries.
SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class ParallelLayout:
    """The parallel layout of one replica.

    `tp` ranks split each layer, `pp` stages split the layers, `ep` of the tp ranks split experts.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.tp * self.pp

    @property
    def moe_tp(self) -> int:
        """Return the number of ranks that split each expert."""
        return self.tp // self.ep

    def stage_layers(self, num_layers: int, stage: int) -> int:
        """Return the layers of a pipeline stage.

        The remainder goes to the first stages, as in TensorRT-LLM's mapping.
        """
        base, rest = divmod(num_layers, self.pp)
        return base + (stage < rest)

    def stage_range(self, num_layers: int, stage: int) -> range:
        """Return the indices of the layers of a pipeline stage."""
        first = sum(self.stage_layers(num_layers, earlier) for earlier in range(stage))
        return range(first, first + self.stage_layers(num_layers, stage))

    def most_layers(self, num_layers: int, has: Callable[[int], bool]) -> int:
        """Return the largest number of layers for which `has` is True on one pipeline stage."""
        return max(sum(map(has, self.stage_range(num_layers, stage))) for stage in range(self.pp))

    def __str__(self) -> str:
        parts = [f"TP{self.tp}"]
        if self.pp > 1:
            parts.append(f"PP{self.pp}")
        if self.ep > 1:
            parts.append(f"EP{self.ep}")
        return " ".join(parts)


def local_kv_heads(model: Architecture, tp: int) -> int:
    """Return the KV heads on one rank, which are replicated when there are more ranks than heads."""
    return -(-model.num_kv_heads // tp)


def candidate_layouts(model: Architecture, tp: int | None, pp: int | None, ep: int | None) -> Iterator[ParallelLayout]:
    """Yield every layout to try. A size that the user pinned is the only one tried."""
    for tensor in [tp] if tp else SIZES:
        for stages in [pp] if pp else SIZES:
            experts = [ep] if ep else sorted({1, tensor}) if model.moe else [1]
            for expert in experts:
                yield ParallelLayout(tensor, stages, expert)


def layout_problem(model: Architecture, precision: QuantFormat, gpu: GpuSpec, layout: ParallelLayout) -> str | None:
    """Return the reason that the layout cannot run at all, or None."""
    return (
        _hardware(precision, gpu, layout)
        or _heads(model, layout)
        or _sizes(model, layout)
        or _experts(model, layout)
        or _groups(model, precision, layout)
    )


def _hardware(precision: QuantFormat, gpu: GpuSpec, layout: ParallelLayout) -> str | None:
    if gpu.sm < precision.sm:
        return f"{precision.name} needs SM{precision.sm}; {gpu.name} is SM{gpu.sm}"
    if layout.tp > gpu.per_node:
        return f"tensor parallelism over {layout.tp} GPUs leaves the node of {gpu.per_node}"
    return None


def _heads(model: Architecture, layout: ParallelLayout) -> str | None:
    if model.num_heads % layout.tp:
        return f"{model.num_heads} attention heads do not divide by tp {layout.tp}"
    kv, tp = model.num_kv_heads, layout.tp
    if model.mla is None and kv % tp and tp % kv:
        return f"{kv} KV heads and tp {tp}: neither divides the other"
    if model.recurrent and model.recurrent.groups % tp:
        return f"{model.recurrent.groups} key heads or groups of recurrent layers do not divide by tp {tp}"
    return None


def _sizes(model: Architecture, layout: ParallelLayout) -> str | None:
    if layout.pp > model.num_layers:
        return f"{layout.pp} stages for {model.num_layers} layers"
    if layout.tp % layout.ep:
        return f"ep {layout.ep} does not divide tp {layout.tp}"
    if model.has_dense_layers and model.intermediate_size % layout.tp:
        return f"intermediate_size {model.intermediate_size} does not divide by tp {layout.tp}"
    return None


def _experts(model: Architecture, layout: ParallelLayout) -> str | None:
    if model.moe is None:
        return "a dense model has no experts to split" if layout.ep > 1 else None
    if model.moe.num_experts % layout.ep:
        return f"{model.moe.num_experts} experts do not divide by ep {layout.ep}"
    if model.moe.moe_intermediate_size % layout.moe_tp:
        return f"expert size {model.moe.moe_intermediate_size} does not divide by moe_tp {layout.moe_tp}"
    return None


def _groups(model: Architecture, precision: QuantFormat, layout: ParallelLayout) -> str | None:
    """Return a reason if a group of quantised weights would cross ranks, or None.

    In a row-parallel layer, the weights of a group share one scale.
    """
    size = precision.block or (precision.group if precision.group != PER_CHANNEL else None)
    if size is None:
        return None
    for name, width in _row_inputs(model, precision, layout):
        if width % size:
            return f"{name} of a rank is {width}: not a multiple of {precision.name}'s group of {size}"
    return None


def _row_inputs(model: Architecture, precision: QuantFormat, layout: ParallelLayout) -> Iterator[tuple[str, int]]:
    if "attention" in precision.parts:
        value_dim = model.mla.v_head_dim if model.mla else model.head_dim
        yield "the attention output", model.num_heads * value_dim // layout.tp
    if "mlp" in precision.parts and model.has_dense_layers:
        yield "intermediate_size", model.intermediate_size // layout.tp
    if model.moe and "experts" in precision.parts:
        yield "the expert size", model.moe.moe_intermediate_size // layout.moe_tp
