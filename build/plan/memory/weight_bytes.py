"""Compute the bytes of weights from shapes, of one rank and of a whole checkpoint."""

from collections import Counter

from llmops.build.model.architecture import Architecture, RecurrentShape
from llmops.build.plan.memory import rank_matrices
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.memory.rank_matrices import RankLinear
from llmops.build.quant_formats import QuantFormat

#: Size of one unquantised weight in bytes, by dtype.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def rank_weights(model: Architecture, precision: QuantFormat, layout: ParallelLayout) -> dict[str, int]:
    """Return the bytes of weights by part, on the fullest rank.

    The parts are attention, mlp, experts, router, norms, embedding and lm_head.
    """
    stages = [stage_weights(model, precision, layout, stage) for stage in range(layout.pp)]
    largest: Counter[str] = max(stages, key=lambda parts: parts.total())
    return dict(largest)


def checkpoint_weights(model: Architecture, precision: QuantFormat) -> dict[str, int]:
    """Return the bytes of weights by part, of the whole checkpoint.

    Layers for multi-token prediction are included.
    """
    total = stage_weights(model, precision, ParallelLayout(), 0)
    for _ in range(model.next_token_layers):
        total.update(_next_token_layer(model, precision))
    return dict(total)


def stage_weights(model: Architecture, precision: QuantFormat, layout: ParallelLayout, stage: int) -> Counter[str]:
    """Return the bytes of weights by part, on each rank of one pipeline stage."""
    total: Counter[str] = Counter()
    for layer in layout.stage_range(model.num_layers, stage):
        linears: list[RankLinear] = []
        if model.has_attention(layer):
            linears += rank_matrices.attention(model, layout)
        if model.is_recurrent(layer):
            linears += rank_matrices.recurrent(model, layout)
        if model.is_moe(layer):
            linears += rank_matrices.experts(model, layout)
        elif model.is_dense(layer):
            linears += rank_matrices.mlp(model, layout)
        total.update(_layer_weights(model, precision, layout, linears))
    rows = rank_matrices.padded_vocab(model, layout.tp) // layout.tp
    table = precision.table_bytes(rows, model.hidden_size, _dtype_bytes(model))
    last = stage == layout.pp - 1
    if stage == 0:
        total["embedding"] = table
    if last:
        total["norms"] += model.hidden_size * _dtype_bytes(model)
        if not (model.tie_word_embeddings and stage == 0):
            total["lm_head"] = table
    return total


def _layer_weights(
    model: Architecture, precision: QuantFormat, layout: ParallelLayout, linears: list[RankLinear]
) -> Counter[str]:
    """Return the bytes of weights by part, of one decoder layer on one rank."""
    total: Counter[str] = Counter()
    for linear in linears:
        one = precision.linear_bytes(linear.inputs, linear.outputs, linear.part, _dtype_bytes(model))
        total[linear.part] += linear.count * one
    total["norms"] += _vectors(model, layout, linears) * _dtype_bytes(model)
    return total


def _vectors(model: Architecture, layout: ParallelLayout, linears: list[RankLinear]) -> int:
    """Return the number of values in norms, biases, sinks and convolutions of one layer.

    These values are never quantised.
    """
    names = {linear.name for linear in linears}
    moe = "mlp.router" in names
    count = model.norms_per_layer * model.hidden_size
    if model.recurrent and "recurrent.in" in names:
        return count + _recurrent_vectors(model.recurrent, layout)
    if model.qk_norm and "attention.qkv" in names:
        count += 2 * model.head_dim
    if model.mla:
        count += (model.mla.q_lora_rank or 0) + model.mla.kv_lora_rank
    if model.attention_sinks:
        count += model.num_heads // layout.tp
    return count + sum(linear.count * linear.outputs for linear in linears if _has_bias(model, linear, moe))


def _recurrent_vectors(shape: RecurrentShape, layout: ParallelLayout) -> int:
    convolution = shape.conv_size * (shape.kernel + shape.conv_bias)
    norm = shape.inner_size if shape.wide_norm else shape.head_dim * layout.tp
    return (convolution + shape.vectors * shape.heads + norm) // layout.tp


def _has_bias(model: Architecture, linear: RankLinear, moe: bool) -> bool:
    if linear.part == "attention":
        return model.output_bias if linear.name.endswith("dense") else model.qkv_bias
    if moe:
        return model.moe is not None and model.moe.expert_bias
    return model.mlp_bias


def _next_token_layer(model: Architecture, precision: QuantFormat) -> Counter[str]:
    """Return the bytes of a multi-token prediction layer.

    The layer has an MoE layer, the projection that joins hidden state and embedding, and in some
    models an embedding and a head.
    """
    width = _dtype_bytes(model)
    layout = ParallelLayout()
    linears = [*rank_matrices.attention(model, layout)]
    linears += rank_matrices.mlp(model, layout) if model.moe is None else rank_matrices.experts(model, layout)
    layer = _layer_weights(model, precision, layout, linears)
    layer["norms"] += 3 * model.hidden_size * width
    layer["router"] += 2 * model.hidden_size * model.hidden_size * width
    if not model.next_token_embeddings:
        return layer
    layer["embedding"] += model.vocab_size * model.hidden_size * width
    layer["lm_head"] += model.vocab_size * model.hidden_size * width
    return layer


def _dtype_bytes(model: Architecture) -> int:
    return DTYPE_BYTES[model.dtype]
