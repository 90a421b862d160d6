"""Build the OpenVINO graph of a decoder: RMSNorm, rotary attention with a KV-cache state, SwiGLU.

The subgraphs have the form that OpenVINO's fusions (RMS, RoPE, SDPA) and its conversion of SDPA to
paged attention recognise. `WeightStorage` decides how a weight is stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import op
from openvino import opset13 as ops

from llmops.build.checkpoint.weight_sources import WeightSource
from llmops.build.model.architecture import Architecture
from llmops.build.targets.openvino.weight_compression import WeightStorage

Node = Any  # The opset functions accept both ov.Node and ov.Output.


@dataclass(frozen=True)
class DecoderShape:
    """The parameters of the graph that are not sizes of the architecture."""

    architecture: Architecture
    rms_norm_eps: float
    inverse_frequencies: NDArray[np.float32]


def build_decoder(
    shape: DecoderShape, weights: WeightSource, storage: WeightStorage, on_layer: Callable[[], None] = lambda: None
) -> ov.Model:
    """Return the OpenVINO graph of a decoder.

    Inputs are input_ids, attention_mask and position_ids, INT64 [batch, length], and beam_idx,
    INT32 [batch]. The output is logits.
    """
    return _Decoder(shape, weights, storage).model(on_layer)


class _Decoder:
    """A builder of the graph. Each method adds one part and returns its last node."""

    def __init__(self, shape: DecoderShape, weights: WeightSource, storage: WeightStorage) -> None:
        self.shape, self.arch = shape, shape.architecture
        self.weights, self.storage = weights, storage
        self.input_ids = input_node("input_ids", [-1, -1])
        self.attention_mask = input_node("attention_mask", [-1, -1])
        self.position_ids = input_node("position_ids", [-1, -1])
        self.beam_idx = input_node("beam_idx", [-1], np.int32)
        self.sinks: list[Node] = []
        self.batch = _dim(self.input_ids, 0)
        self.cos, self.sin = self.rotary()
        self.mask = self.causal_mask()

    def model(self, on_layer: Callable[[], None]) -> ov.Model:
        table = (self.arch.vocab_size, self.arch.hidden_size)
        embedding = self.storage.matrix(self.weights.get("model.embed_tokens.weight", table), embedding=True)
        hidden = ops.gather(embedding, ops.convert(self.input_ids, "i32"), int_constant(0))
        for index in range(self.arch.num_layers):
            hidden = self.layer(hidden, index)
            self.weights.forget()
            on_layer()
        hidden = self.norm(hidden, "model.norm.weight", self.arch.hidden_size)
        logits = ops.matmul(hidden, self.head(embedding, table), False, True)
        logits.output(0).set_names({"logits"})
        result = op.Result(logits.output(0))
        inputs = [self.input_ids, self.attention_mask, self.position_ids, self.beam_idx]
        return ov.Model([result], self.sinks, inputs, self.arch.family)

    def head(self, embedding: Node, shape: tuple[int, int]) -> Node:
        tied = self.arch.tie_word_embeddings or not self.weights.has("lm_head.weight")
        return embedding if tied else self.storage.matrix(self.weights.get("lm_head.weight", shape), embedding=True)

    def layer(self, hidden: Node, index: int) -> Node:
        prefix = f"model.layers.{index}"
        size = self.arch.hidden_size
        normed = self.norm(hidden, f"{prefix}.input_layernorm.weight", size)
        hidden = ops.add(hidden, self.attention(normed, index, f"{prefix}.self_attn"))
        normed = self.norm(hidden, f"{prefix}.post_attention_layernorm.weight", size)
        return ops.add(hidden, self.mlp(normed, f"{prefix}.mlp"))

    def mlp(self, hidden: Node, prefix: str) -> Node:
        size, inner = self.arch.hidden_size, self.arch.intermediate_size
        gate = ops.swish(self.linear(hidden, f"{prefix}.gate_proj", inner, size))
        gated = ops.multiply(gate, self.linear(hidden, f"{prefix}.up_proj", inner, size))
        return self.linear(gated, f"{prefix}.down_proj", size, inner)

    def attention(self, hidden: Node, index: int, prefix: str) -> Node:
        arch = self.arch
        query = self.heads(hidden, f"{prefix}.q_proj", arch.num_heads, f"{prefix}.q_norm")
        key = self.heads(hidden, f"{prefix}.k_proj", arch.num_kv_heads, f"{prefix}.k_norm")
        value = self.heads(hidden, f"{prefix}.v_proj", arch.num_kv_heads, None)
        key = self.cached(self.rotated(key), f"past_key_values.{index}.keypresent.{index}.key")
        value = self.cached(value, f"past_key_values.{index}.valuepresent.{index}.value")
        context = ops.scaled_dot_product_attention(
            self.rotated(query), self.repeated(key), self.repeated(value), self.mask
        )
        merged = ops.reshape(ops.transpose(context, int_constant([0, 2, 1, 3])), int_constant([0, 0, -1]), True)
        return self.linear(merged, f"{prefix}.o_proj", arch.hidden_size, arch.num_heads * arch.head_dim)

    def heads(self, hidden: Node, name: str, count: int, norm: str | None) -> Node:
        """Project `hidden` by the layer `name` to `count` heads: [batch, count, length, head_dim].

        In a model with norms of queries and keys (`qk_norm`), the heads are first normed with the
        weights of the layer `norm`, unless `norm` is None.
        """
        projected = self.linear(hidden, name, count * self.arch.head_dim, self.arch.hidden_size)
        split = ops.reshape(projected, int_constant([0, 0, count, self.arch.head_dim]), True)
        if norm is not None and self.arch.qk_norm:
            split = self.norm(split, f"{norm}.weight", self.arch.head_dim)
        return ops.transpose(split, int_constant([0, 2, 1, 3]))

    def cached(self, new: Node, variable_id: str) -> Node:
        """Append the keys or values `new` to a cache, and return the whole cache.

        The cache is the state `variable_id` of the graph, and starts with length 0. `beam_idx`
        reorders the sequences of the cache.
        """
        arch = self.arch
        info = op.util.VariableInfo()
        info.data_shape = ov.PartialShape([-1, arch.num_kv_heads, -1, arch.head_dim])
        info.data_type = ov.Type.f32
        info.variable_id = variable_id
        variable = op.util.Variable(info)
        empty = ops.concat(
            [self.batch, int_constant([arch.num_kv_heads]), int_constant([0]), int_constant([arch.head_dim])], 0
        )
        past = op.read_value(ops.broadcast(float_constant(0.0), empty), variable)
        full = ops.concat([ops.gather(past, self.beam_idx, int_constant(0)), new], 2)
        self.sinks.append(op.assign(full, variable))
        return full

    def repeated(self, cached: Node) -> Node:
        """Repeat KV heads for grouped-query attention.

        Each KV head serves num_heads / num_kv_heads query heads.
        """
        arch = self.arch
        groups = arch.num_heads // arch.num_kv_heads
        if groups == 1:
            return cached
        one = int_constant([1])
        target = ops.concat(
            [self.batch, int_constant([arch.num_kv_heads]), int_constant([groups]), one, int_constant([arch.head_dim])],
            0,
        )
        wide = ops.broadcast(ops.unsqueeze(cached, int_constant(2)), target, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, int_constant([0, arch.num_heads, -1, arch.head_dim]), True)

    def rotated(self, heads: Node) -> Node:
        half = self.arch.head_dim // 2
        first = ops.slice(heads, int_constant([0]), int_constant([half]), int_constant([1]), int_constant([3]))
        second = ops.slice(heads, int_constant([half]), int_constant([2**63 - 1]), int_constant([1]), int_constant([3]))
        turned = ops.concat([ops.multiply(second, float_constant(np.full((1, 1, 1, 1), -1.0))), first], -1)
        return ops.add(ops.multiply(heads, self.cos), ops.multiply(turned, self.sin))

    def rotary(self) -> tuple[Node, Node]:
        """Return cosine and sine of the rotary embedding, [batch, 1, length, head_dim]."""
        frequencies = float_constant(self.shape.inverse_frequencies.reshape(1, -1, 1))
        wide = ops.broadcast(
            frequencies,
            ops.concat([self.batch, int_constant([1]), int_constant([1])], 0),
            broadcast_spec="BIDIRECTIONAL",
        )
        positions = ops.convert(ops.unsqueeze(self.position_ids, int_constant(1)), "f32")
        angles = ops.transpose(ops.matmul(wide, positions, False, False), int_constant([0, 2, 1]))
        both = ops.concat([angles, angles], -1)
        return ops.unsqueeze(ops.cos(both), int_constant(1)), ops.unsqueeze(ops.sin(both), int_constant(1))

    def causal_mask(self) -> Node:
        """Return the attention mask [batch, 1, length, total].

        The mask is 0 where a token may attend, and the lowest float elsewhere.
        """
        length, total = _dim(self.input_ids, 1), _dim(self.attention_mask, 1)
        scalar = int_constant([])
        columns = ops.range(int_constant(0), ops.reshape(total, scalar, False), int_constant(1), "i64")
        past = ops.subtract(total, length)
        rows = ops.add(ops.range(int_constant(0), ops.reshape(length, scalar, False), int_constant(1), "i64"), past)
        causal = ops.less_equal(ops.unsqueeze(columns, int_constant(0)), ops.unsqueeze(rows, int_constant(1)))
        present = ops.unsqueeze(ops.convert(self.attention_mask, "boolean"), int_constant([1, 2]))
        allowed = ops.logical_and(ops.unsqueeze(causal, int_constant([0, 1])), present)
        return ops.select(allowed, float_constant(0.0), float_constant(np.finfo(np.float32).min))

    def norm(self, hidden: Node, name: str, size: int) -> Node:
        one = (1,) * 3
        square = ops.power(hidden, float_constant(np.full(one, 2.0)))
        mean = ops.reduce_mean(square, int_constant([-1]), True)
        root = ops.sqrt(ops.add(mean, float_constant(np.full(one, self.shape.rms_norm_eps))))
        normed = ops.multiply(ops.divide(float_constant(np.ones(one)), root), hidden)
        return ops.multiply(normed, float_constant(self.weights.get(name, (size,)).float32().reshape(1, 1, -1)))

    def linear(self, hidden: Node, name: str, outputs: int, inputs: int) -> Node:
        weight = self.weights.get(f"{name}.weight", (outputs, inputs))
        product = ops.matmul(hidden, self.storage.matrix(weight), False, True)
        if not self.weights.has(f"{name}.bias"):
            return product
        bias = self.weights.get(f"{name}.bias", (outputs,)).float32()
        return ops.add(product, float_constant(bias.reshape(1, 1, -1)))


def input_node(name: str, shape: list[int], dtype: Any = np.int64) -> Node:
    """Return an input of the graph, called `name`. A dimension of -1 is dynamic."""
    node = ops.parameter(shape, dtype, name=name)
    node.output(0).set_names({name})
    return node


def _dim(node: Node, axis: int) -> Node:
    """Return a node with one dimension of a tensor, shape [1]."""
    return ops.gather(ops.shape_of(node), int_constant([axis]), int_constant(0))


def int_constant(value: Any) -> Node:
    """Return an INT64 constant node."""
    return ops.constant(np.array(value, dtype=np.int64))


def float_constant(value: Any) -> Node:
    """Return an FP32 constant node."""
    return ops.constant(np.array(value, dtype=np.float32))
