"""Build the OpenVINO graph of an encoder in float32.

The graph has BERT's layers, and then either pooling and normalisation or the layers of a score.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import op
from openvino import opset13 as ops

from llmops.build.checkpoint.file_checks import open_checked
from llmops.build.encoder.encoder_checkpoint import EncoderCheckpoint
from llmops.build.targets.openvino.decoder_graph import float_constant, input_node, int_constant
from llmops.errors import CheckpointError

Node = Any
_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_ACTIVATIONS = ("gelu", "gelu_new", "relu")


def build_graph(checkpoint: EncoderCheckpoint, on_layer: Callable[[], None] = lambda: None) -> ov.Model:
    """Return the OpenVINO graph of an encoder.

    Inputs are input_ids and attention_mask, INT64 [batch, length]; the output is embedding, FP32
    [batch, hidden_size]. A cross-encoder also has the input token_type_ids, and the output score,
    FP32 [batch, 1], from 0 to 1.
    """
    return _Encoder(checkpoint).model(on_layer)


class _Encoder:
    """A builder of the graph. Each method adds one part and returns its last node."""

    def __init__(self, checkpoint: EncoderCheckpoint) -> None:
        self.checkpoint, config = checkpoint, checkpoint.config
        self.heads = int(config["num_attention_heads"])
        self.head_dim = int(config["hidden_size"]) // self.heads
        self.epsilon = float(config.get("layer_norm_eps", 1e-12))
        if not 0 <= self.epsilon < 1:
            raise ValueError("the epsilon is not in [0, 1)")
        self.activation = str(config.get("hidden_act", "gelu"))
        if self.activation not in _ACTIVATIONS:
            raise CheckpointError(
                f"{checkpoint.ref} uses the activation {self.activation}, which is not supported; use another model."
            )
        self.input_ids = input_node("input_ids", [-1, -1])
        self.attention_mask = input_node("attention_mask", [-1, -1])
        # The graph of a plain encoder has no token types as input, so every token gets the first
        # type.
        self.token_type_ids = input_node("token_type_ids", [-1, -1]) if checkpoint.head else None

    def model(self, on_layer: Callable[[], None]) -> ov.Model:
        hidden = self.embeddings()
        mask = self.mask()
        for index in range(int(self.checkpoint.config["num_hidden_layers"])):
            hidden = self.layer(hidden, mask, f"encoder.layer.{index}")
            on_layer()
        head = self.checkpoint.head
        name, result = ("score", self.score(hidden, *head)) if head else ("embedding", self.vector(hidden))
        result.output(0).set_names({name})
        parameters = (self.input_ids, self.attention_mask, self.token_type_ids)
        return ov.Model([op.Result(result.output(0))], [one for one in parameters if one is not None], "encoder")

    def vector(self, hidden: Node) -> Node:
        pooled = self.pooled(hidden)
        return ops.normalize_l2(pooled, int_constant([1]), 1e-24, "max") if self.checkpoint.normalise else pooled

    def score(self, hidden: Node, inner: str, last: str) -> Node:
        return ops.sigmoid(self.linear(ops.tanh(self.linear(self.pooled(hidden), inner)), last))

    def embeddings(self) -> Node:
        words = ops.gather(self.weight("embeddings.word_embeddings.weight"), self.input_ids, int_constant(0))
        position_vectors = ops.gather(
            self.weight("embeddings.position_embeddings.weight"), self.positions(), int_constant(0)
        )
        return self.norm(ops.add(ops.add(words, self.types()), position_vectors), "embeddings.LayerNorm")

    def types(self) -> Node:
        table = self.array("embeddings.token_type_embeddings.weight")
        if self.token_type_ids is None:
            return float_constant(table[0].reshape(1, 1, -1))
        return ops.gather(float_constant(table), self.token_type_ids, int_constant(0))

    def positions(self) -> Node:
        positions = ops.cum_sum(self.attention_mask, int_constant(1))
        first = self.checkpoint.position_offset - 1
        return ops.maximum(ops.add(positions, int_constant(first)), int_constant(0))

    def mask(self) -> Node:
        present = ops.unsqueeze(ops.convert(self.attention_mask, "boolean"), int_constant([1, 2]))
        return ops.select(present, float_constant(0.0), float_constant(np.finfo(np.float32).min))

    def layer(self, hidden: Node, mask: Node, prefix: str) -> Node:
        attended = self.linear(
            self.attention(hidden, mask, f"{prefix}.attention.self"), f"{prefix}.attention.output.dense"
        )
        hidden = self.norm(ops.add(attended, hidden), f"{prefix}.attention.output.LayerNorm")
        inner = self.activated(self.linear(hidden, f"{prefix}.intermediate.dense"))
        return self.norm(ops.add(self.linear(inner, f"{prefix}.output.dense"), hidden), f"{prefix}.output.LayerNorm")

    def activated(self, hidden: Node) -> Node:
        if self.activation == "relu":
            return ops.relu(hidden)
        return ops.gelu(hidden, "erf" if self.activation == "gelu" else "tanh")

    def attention(self, hidden: Node, mask: Node, prefix: str) -> Node:
        query, key, value = (self.split(self.linear(hidden, f"{prefix}.{name}")) for name in ("query", "key", "value"))
        scores = ops.multiply(ops.matmul(query, key, False, True), float_constant(1.0 / math.sqrt(self.head_dim)))
        context = ops.matmul(ops.softmax(ops.add(scores, mask), -1), value, False, False)
        return ops.reshape(ops.transpose(context, int_constant([0, 2, 1, 3])), int_constant([0, 0, -1]), True)

    def split(self, projected: Node) -> Node:
        """Split heads: [batch, length, heads * head_dim] -> [batch, heads, length, head_dim]."""
        return ops.transpose(
            ops.reshape(projected, int_constant([0, 0, self.heads, self.head_dim]), True), int_constant([0, 2, 1, 3])
        )

    def pooled(self, hidden: Node) -> Node:
        if self.checkpoint.pooling == "cls":
            return ops.gather(hidden, int_constant(0), int_constant(1))
        present = ops.unsqueeze(ops.convert(self.attention_mask, "f32"), int_constant(2))
        total = ops.reduce_sum(ops.multiply(hidden, present), int_constant([1]), False)
        return ops.divide(total, ops.maximum(ops.reduce_sum(present, int_constant([1]), False), float_constant(1e-9)))

    def norm(self, hidden: Node, name: str) -> Node:
        centred = ops.mvn(hidden, int_constant([-1]), True, self.epsilon, "inside_sqrt")
        scaled = ops.multiply(centred, float_constant(self.array(f"{name}.weight").reshape(1, 1, -1)))
        return ops.add(scaled, float_constant(self.array(f"{name}.bias").reshape(1, 1, -1)))

    def linear(self, hidden: Node, name: str) -> Node:
        product = ops.matmul(hidden, self.weight(f"{name}.weight"), False, True)
        return ops.add(product, float_constant(self.array(f"{name}.bias")))

    def weight(self, name: str) -> Node:
        return float_constant(self.array(name))

    def array(self, name: str) -> NDArray[np.float32]:
        tensors = self.checkpoint.tensors
        info = tensors.get(self.checkpoint.prefix + name) or tensors.get(name)
        if info is None or info.dtype not in _NUMPY:
            raise CheckpointError(f"{self.checkpoint.ref} lacks the tensor {name} in a float type; download it again.")
        with open_checked(self.checkpoint.path / info.file, self.checkpoint.path) as file:
            raw = np.fromfile(file, _NUMPY[info.dtype], info.numel, offset=info.offset)
        wide = (raw.astype(np.uint32) << 16).view(np.float32) if info.dtype == "BF16" else raw.astype(np.float32)
        return wide.reshape(info.shape)
