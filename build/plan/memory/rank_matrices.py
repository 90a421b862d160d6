"""List the weight matrices of one rank.

The bytes of weights and the duration of a step are computed from this list.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from llmops.build.model.architecture import Architecture
from llmops.build.plan.memory.parallel_layout import ParallelLayout, local_kv_heads


@dataclass(frozen=True)
class RankLinear:
    """A rank's part of a weight matrix [outputs, inputs].

    `part` is attention, mlp, experts or router. The router is never quantised. `count` is the
    number of equal matrices, such as one for each of the rank's experts.
    """

    name: str
    inputs: int
    outputs: int
    part: str
    count: int = 1


def attention(model: Architecture, layout: ParallelLayout) -> Iterator[RankLinear]:
    """Yield the matrices of attention: qkv and dense, or MLA's down and up projections.

    More ranks than KV heads replicate the heads.
    """
    heads = model.num_heads // layout.tp
    if model.mla is None:
        queries = heads * (2 if model.attention_gate else 1)
        width = (queries + 2 * local_kv_heads(model, layout.tp)) * model.head_dim
        yield RankLinear("attention.qkv", model.hidden_size, width, "attention")
        yield RankLinear("attention.dense", heads * model.head_dim, model.hidden_size, "attention")
        return
    mla = model.mla
    key_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    if mla.q_lora_rank:
        yield RankLinear("attention.q_a", model.hidden_size, mla.q_lora_rank, "attention")
        yield RankLinear("attention.q_b", mla.q_lora_rank, heads * key_dim, "attention")
    else:
        yield RankLinear("attention.q", model.hidden_size, heads * key_dim, "attention")
    yield RankLinear("attention.kv_a", model.hidden_size, latent, "attention")
    yield RankLinear("attention.kv_b", mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), "attention")
    yield RankLinear("attention.dense", heads * mla.v_head_dim, model.hidden_size, "attention")
    if mla.index_heads:  # Each rank holds the whole indexer.
        yield RankLinear("attention.index_q", mla.q_lora_rank or 0, mla.index_heads * mla.index_head_dim, "attention")
        yield RankLinear("attention.index_k", model.hidden_size, mla.index_head_dim, "attention")
        yield RankLinear("attention.index_weights", model.hidden_size, mla.index_heads, "attention")


def recurrent(model: Architecture, layout: ParallelLayout) -> Iterator[RankLinear]:
    """Yield the matrices of linear attention or Mamba, whose heads are split over all tp ranks."""
    shape = model.recurrent
    if shape is None:
        return
    width = shape.inner_size + shape.conv_size + shape.gates * shape.heads
    yield RankLinear("recurrent.in", model.hidden_size, width // layout.tp, "attention")
    yield RankLinear("recurrent.out", shape.inner_size // layout.tp, model.hidden_size, "attention")


def mlp(model: Architecture, layout: ParallelLayout) -> Iterator[RankLinear]:
    """Yield the matrices of a dense layer's MLP, split over all tp ranks."""
    yield from _mlp(model, "mlp", model.hidden_size, model.intermediate_size // layout.tp, "mlp")


def experts(model: Architecture, layout: ParallelLayout) -> Iterator[RankLinear]:
    """Yield an MoE layer's matrices: the router, the rank's experts and the shared experts."""
    moe = model.moe
    if moe is None:
        return
    yield RankLinear("mlp.router", model.hidden_size, moe.num_experts, "router")
    share = moe.moe_intermediate_size // layout.moe_tp
    hidden = moe.latent_size or model.hidden_size
    yield from _mlp(model, "mlp.experts", hidden, share, "experts", moe.num_experts // layout.ep)
    if moe.latent_size:
        yield RankLinear("mlp.latent_in", model.hidden_size, moe.latent_size, "mlp")
        yield RankLinear("mlp.latent_out", moe.latent_size, model.hidden_size, "mlp")
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * moe.moe_intermediate_size // layout.tp
        yield from _mlp(model, "mlp.shared", model.hidden_size, shared, "mlp")


def _mlp(model: Architecture, name: str, hidden: int, width: int, part: str, count: int = 1) -> Iterator[RankLinear]:
    if model.gated_mlp:
        yield RankLinear(f"{name}.gate_up", hidden, 2 * width, part, count)
    else:
        yield RankLinear(f"{name}.up", hidden, width, part, count)
    yield RankLinear(f"{name}.proj", width, hidden, part, count)


def padded_vocab(model: Architecture, tp: int) -> int:
    """Return the vocabulary size padded to a multiple of tp, as TensorRT-LLM pads it."""
    return -(-model.vocab_size // tp) * tp
