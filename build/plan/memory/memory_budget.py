"""The memory of one GPU: weights, buffers, and the rest for the KV cache."""

from dataclasses import dataclass

from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpu_specs import MIB, GpuSpec
from llmops.build.plan.memory import kv_sizes, rank_matrices
from llmops.build.plan.memory.parallel_layout import ParallelLayout, local_kv_heads
from llmops.build.plan.memory.weight_bytes import rank_weights
from llmops.build.quant_formats import QuantFormat

#: Bytes of CUDA context, cuBLAS workspaces and the library's own code: AIConfigurator's measured
#: figure before its safety margin.
RUNTIME = 551 * MIB
#: Bytes of NCCL's buffers by number of ranks, measured by AIConfigurator on H100.
NCCL = {1: 0, 2: 342 * MIB, 4: 392 * MIB, 8: 392 * MIB}
#: Bytes per peer of each of the three buffers in TensorRT-LLM's all-reduce workspace.
ALL_REDUCE_BUFFER = 8_000_000
#: Bytes that a captured kernel keeps for its node and arguments.
GRAPH_KERNEL = 8 * 1024
#: Kernels of a decoder layer in a captured graph.
KERNELS_PER_LAYER = 12
#: Share of the free memory that becomes KV cache by default, as in TensorRT-LLM.
DEFAULT_KV_FRACTION = 0.9


@dataclass(frozen=True)
class PlannedLimits:
    """The limits that an engine is built for.

    Lengths are in tokens; `kv_fraction` of the memory that is free after loading becomes KV cache.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    kv_fraction: float = DEFAULT_KV_FRACTION


@dataclass(frozen=True)
class MemoryBudget:
    """The memory budget of the GPU that holds the most, in bytes.

    `left` stays free beside the KV cache and is negative for a model that does not fit. `states`
    are those of recurrent layers for `max_batch_size` sequences, which TensorRT-LLM allocates at
    start (`_torch/pyexecutor/mamba_cache_manager.py`).
    """

    total: int
    weights: dict[str, int]
    activations: int
    cuda_graphs: int
    communication: int
    runtime: int
    kv_cache: int
    left: int
    states: int = 0

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(self.weights.values())

    @property
    def fits(self) -> bool:
        """Return True if the model fits."""
        return self.left >= 0

    @property
    def short(self) -> int:
        """Return the bytes that are missing."""
        return max(0, -self.left)


def plan_memory(
    model: Architecture,
    precision: QuantFormat,
    kv_dtype: str,
    layout: ParallelLayout,
    gpu: GpuSpec,
    limits: PlannedLimits,
) -> MemoryBudget:
    """Return the memory of the fullest rank.

    Activations are sized for the limits, as the engine sizes them.
    """
    weights = rank_weights(model, precision, layout)
    fixed = {
        "activations": activation_bytes(model, precision, layout, limits),
        "cuda_graphs": graph_bytes(model, layout, limits.max_batch_size),
        "communication": communication_bytes(layout),
        "runtime": RUNTIME,
        "states": kv_sizes.state_bytes(model, layout) * limits.max_batch_size,
    }
    free = gpu.memory - sum(weights.values()) - sum(fixed.values())
    block = kv_sizes.token_bytes(model, kv_dtype, layout) * kv_sizes.BLOCK_TOKENS
    pool = max(0, int(free * limits.kv_fraction)) // block * block
    return MemoryBudget(total=gpu.memory, weights=weights, kv_cache=pool, left=free - pool, **fixed)


def activation_bytes(model: Architecture, precision: QuantFormat, layout: ParallelLayout, limits: PlannedLimits) -> int:
    """Return the bytes of buffers that live together at the peak of a step of `max_num_tokens`.

    These are the residual stream and the normed input, the larger of attention and MLP, and the
    logits of a full batch in FP32.
    """
    wide = 1 if precision.compute == "fp8" else 2
    stream = 2 * model.hidden_size * 2 + model.hidden_size * wide
    per_token = stream + max(_attention_width(model, layout), _mlp_width(model, layout, wide))
    logits = 2 * limits.max_batch_size * rank_matrices.padded_vocab(model, layout.tp) * 4
    return limits.max_num_tokens * per_token + logits


def _attention_width(model: Architecture, layout: ParallelLayout) -> int:
    heads = model.num_heads // layout.tp
    width = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim if model.mla else model.head_dim
    keys = heads if model.mla else local_kv_heads(model, layout.tp)
    return 2 * width * (2 * heads + 2 * keys)


def _mlp_width(model: Architecture, layout: ParallelLayout, wide: int) -> int:
    """Return the bytes per token of gate_up's output, the activation's and the projection's.

    Expert layers also permute their tokens.
    """
    dense = model.intermediate_size // layout.tp * (2 * 2 + wide) + 2 * model.hidden_size
    if model.moe is None:
        return dense
    copies = model.moe.experts_per_token / layout.ep
    expert = model.moe.moe_intermediate_size // layout.moe_tp * (2 * 2 + wide) + model.hidden_size * (2 + wide)
    return max(dense if model.has_dense_layers else 0, int(copies * expert))


def graph_sizes(max_batch_size: int) -> list[int]:
    """Return the batch sizes for which a decode step is captured as a CUDA graph.

    These are powers of two and steps of 32 up to 256, then powers of two.
    """
    small = [size for size in (1, 2, 4, 8, 16, *range(32, 257, 32)) if size <= max_batch_size]
    large = [size for size in (512, 1024, 2048, 4096) if size <= max_batch_size]
    return [*small, *large]


def graph_bytes(model: Architecture, layout: ParallelLayout, max_batch_size: int) -> int:
    """Estimate the bytes of the nodes of the captured graphs, which share the activation buffers.

    No table is published.
    """
    kernels = layout.stage_layers(model.num_layers, 0) * KERNELS_PER_LAYER
    return len(graph_sizes(max_batch_size)) * kernels * GRAPH_KERNEL


def communication_bytes(layout: ParallelLayout) -> int:
    """Return the bytes of NCCL's buffers and the all-reduce workspace of tensor parallelism."""
    buffers = NCCL.get(layout.gpus, NCCL[8]) if layout.gpus > 1 else 0
    return buffers + (3 * layout.tp * ALL_REDUCE_BUFFER if layout.tp > 1 else 0)
