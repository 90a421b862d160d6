"""Compute the memory of one GPU: weights, buffers, and the rest for the KV cache."""

from dataclasses import dataclass

from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpu_specs import MIB, GpuSpec
from llmops.build.plan.memory import kv_sizes, rank_matrices
from llmops.build.plan.memory.parallel_layout import ParallelLayout, local_kv_heads
from llmops.build.plan.memory.weight_bytes import rank_weights
from llmops.build.quant_formats import QuantFormat

#: Bytes of CUDA context, cuBLAS workspaces and TensorRT-LLM's code. AIConfigurator measured this
#: figure; its safety margin is not included.
RUNTIME = 551 * MIB
#: Bytes of NCCL's buffers by number of ranks. AIConfigurator measured these figures on H100.
NCCL = {1: 0, 2: 342 * MIB, 4: 392 * MIB, 8: 392 * MIB}
#: Bytes of one buffer of TensorRT-LLM's all-reduce workspace. A rank has three such buffers per
#: peer.
ALL_REDUCE_BUFFER = 8_000_000
#: Bytes of one kernel in a captured CUDA graph, for its node and arguments: an estimate.
GRAPH_KERNEL = 8 * 1024
#: Number of kernels of a decoder layer in a captured CUDA graph: an estimate.
KERNELS_PER_LAYER = 12
#: Default share of the free memory that becomes KV cache: TensorRT-LLM's own default.
DEFAULT_KV_FRACTION = 0.9


@dataclass(frozen=True)
class PlannedLimits:
    """The limits for which an engine is planned.

    `max_batch_size` is in sequences, `max_num_tokens` (per step) and `max_seq_len` are in tokens.
    `kv_fraction` is the share of the memory left after loading that becomes KV cache.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    kv_fraction: float = DEFAULT_KV_FRACTION


@dataclass(frozen=True)
class MemoryBudget:
    """The memory budget of the fullest GPU, in bytes.

    `total` is the memory of the GPU, and `weights` the bytes of weights by part. `left` stays free
    beside the KV cache, and is negative for a model that does not fit. `states` are the states of
    recurrent layers for `max_batch_size` sequences, which TensorRT-LLM allocates at start
    (`_torch/pyexecutor/mamba_cache_manager.py`).
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
        """Return the bytes of all weights on the GPU."""
        return sum(self.weights.values())

    @property
    def fits(self) -> bool:
        """Return True if the model fits the GPU."""
        return self.left >= 0

    @property
    def short(self) -> int:
        """Return the bytes that the GPU lacks, 0 if the model fits."""
        return max(0, -self.left)


def plan_memory(
    model: Architecture,
    precision: QuantFormat,
    kv_dtype: str,
    layout: ParallelLayout,
    gpu: GpuSpec,
    limits: PlannedLimits,
) -> MemoryBudget:
    """Return the memory budget of the fullest rank.

    Activations are sized for `limits`, as in the engine.
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
    """Return the bytes of the buffers in use at the peak of a step of `max_num_tokens` tokens.

    The buffers are the residual stream and the normed input, the larger of attention and MLP, and
    the logits of a full batch in FP32.
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
    """Return the bytes per token of the outputs of gate_up, activation and projection in an MLP.

    Layers with experts also hold permuted copies of their tokens. `wide` is the size in bytes of a
    value that a matrix reads: 1 in FP8, otherwise 2.
    """
    dense = model.intermediate_size // layout.tp * (2 * 2 + wide) + 2 * model.hidden_size
    if model.moe is None:
        return dense
    copies = model.moe.experts_per_token / layout.ep
    expert = model.moe.moe_intermediate_size // layout.moe_tp * (2 * 2 + wide) + model.hidden_size * (2 + wide)
    return max(dense if model.has_dense_layers else 0, int(copies * expert))


def graph_sizes(max_batch_size: int) -> list[int]:
    """Return the batch sizes for which a decode step is captured as a CUDA graph.

    The sizes are powers of two up to 32, multiples of 32 up to 256, and powers of two up to 4096.
    """
    small = [size for size in (1, 2, 4, 8, 16, *range(32, 257, 32)) if size <= max_batch_size]
    large = [size for size in (512, 1024, 2048, 4096) if size <= max_batch_size]
    return [*small, *large]


def graph_bytes(model: Architecture, layout: ParallelLayout, max_batch_size: int) -> int:
    """Estimate the bytes of the captured CUDA graphs' nodes. The graphs share activation buffers.

    NVIDIA publishes no sizes of graphs, so the estimate multiplies layers, kernels and bytes.
    """
    kernels = layout.stage_layers(model.num_layers, 0) * KERNELS_PER_LAYER
    return len(graph_sizes(max_batch_size)) * kernels * GRAPH_KERNEL


def communication_bytes(layout: ParallelLayout) -> int:
    """Return the bytes of NCCL's buffers and of tensor parallelism's all-reduce workspace."""
    buffers = NCCL.get(layout.gpus, NCCL[8]) if layout.gpus > 1 else 0
    return buffers + (3 * layout.tp * ALL_REDUCE_BUFFER if layout.tp > 1 else 0)
