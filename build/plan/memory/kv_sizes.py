"""Compute bytes of the KV cache, per token and per sequence, and the sequences that fit."""

from llmops.build.model.architecture import Architecture
from llmops.build.plan.memory.parallel_layout import ParallelLayout, local_kv_heads
from llmops.build.quant_formats import QuantFormat
from llmops.errors import InputError

#: Number of tokens per block of the paged KV cache, as in the engines that llmops builds.
BLOCK_TOKENS = 32
#: Size of one cached value in bytes, by the dtype of the KV cache.
KV_BYTES = {"bf16": 2, "fp8": 1, "int8": 1}


def find_kv(name: str, precision: QuantFormat) -> str:
    """Return the dtype of the KV cache (bf16, fp8 or int8) for a value of `--kv-dtype`.

    With `auto`, the dtype follows the weights.

    Raises:
        InputError: The name is unknown.
    """
    key = {"auto": precision.kv, "fp16": "bf16"}.get(name.lower(), name.lower())
    if key not in KV_BYTES:
        raise InputError(f"The KV cache dtype {name!r} is unknown; choose one of auto, {', '.join(KV_BYTES)}.")
    return key


def token_bytes(model: Architecture, kv: str, layout: ParallelLayout = ParallelLayout()) -> int:
    """Return the bytes of one token in the KV cache of the rank with the most layers.

    MLA keeps one latent vector per token, and every tensor-parallel rank holds the whole vector.
    """
    return layout.most_layers(model.num_layers, model.has_attention) * layer_bytes(model, kv, layout)


def state_bytes(model: Architecture, layout: ParallelLayout) -> int:
    """Return the bytes of a sequence's recurrent states on the rank with the most recurrent layers.

    The states of the heads are float32 (`mamba_ssm_dtype` of Qwen3.5, `mamba_ssm_cache_dtype` of
    Nemotron 3). The inputs that the convolution keeps have the dtype of the model.
    """
    shape = model.recurrent
    if shape is None:
        return 0
    layer = 4 * shape.inner_size * shape.state + 2 * (shape.kernel - 1) * shape.conv_size
    return layout.most_layers(model.num_layers, model.is_recurrent) * layer // layout.tp


def layer_bytes(model: Architecture, kv: str, layout: ParallelLayout) -> int:
    """Return the bytes of one token in the KV cache of one layer on one rank."""
    if model.mla:
        latent = (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim) * KV_BYTES[kv]
        return latent + _index_bytes(model.mla.index_head_dim)
    return 2 * local_kv_heads(model, layout.tp) * model.head_dim * KV_BYTES[kv]


def _index_bytes(width: int) -> int:
    """Return the bytes of one token's key in the cache of the sparse-attention indexer.

    The key is FP8 with a float32 scale for each 128 values, for every dtype of the KV cache
    (NVIDIA/TensorRT-LLM `tensorrt_llm/_torch/attention_backend/sparse/dsa.py`).
    """
    return width + -(-width // 128) * 4


def sequence_bytes(model: Architecture, kv: str, layout: ParallelLayout, length: int) -> int:
    """Return the KV cache's bytes of a sequence of `length` tokens on one rank, in whole blocks.

    Layers with a sliding window count like other layers: TensorRT-LLM keeps the whole sequence
    unless `max_attention_window` is set, and target pytorch does not set it.
    """
    return _blocks(length) * token_bytes(model, kv, layout)


def sequences_that_fit(pool: int, model: Architecture, kv: str, layout: ParallelLayout, length: int) -> int:
    """Return the number of sequences of `length` tokens that `pool` bytes per rank hold."""
    return pool // sequence_bytes(model, kv, layout, length)


def _blocks(length: int) -> int:
    return -(-length // BLOCK_TOKENS) * BLOCK_TOKENS
