"""The duration of one engine step.

A step has a batch of sequences that each gain a token, and prompts that are read.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from llmops.build.model.architecture import Architecture
from llmops.build.plan.memory import rank_matrices
from llmops.build.plan.memory.parallel_layout import ParallelLayout, local_kv_heads
from llmops.build.plan.memory.rank_matrices import RankLinear
from llmops.build.plan.timing.interpolation import InterpolationGrid
from llmops.build.plan.timing.operation_times import AttentionShape, ExpertsShape, OperationTimes
from llmops.build.quant_formats import QuantFormat

#: Seconds of host work per step that the GPU waits for.
STEP_OVERHEAD = 1.5e-3
#: Seconds of host work per sequence: sampling results, stop checks, scheduling.
SEQUENCE_OVERHEAD = 2.0e-6
#: Passes over the FP32 logits of a step: copy, penalties, soft-max, draw.
LOGIT_PASSES = 4
#: Passes of a recurrent layer over its vectors: convolution, scan and gate, each read and written.
RECURRENT_PASSES = 6


class _Blocks(NamedTuple):
    """Numbers of blocks: mixers (attention, recurrent) and MLPs (dense, moe)."""

    attention: int
    recurrent: int
    dense: int
    moe: int


@dataclass(frozen=True)
class Prefill:
    """The prompts of a step: `prompts` × `tokens` new tokens, after `prefix` cached ones each."""

    prompts: int
    tokens: int
    prefix: int = 0


@dataclass(frozen=True)
class MeasuredCorrection:
    """Ratios of measured to predicted seconds of one engine.

    `decode` is a grid by (batch, context), `prefill` by (sequences, new tokens of each), None if
    the phase was not measured. `layout` is the measured one; other layouts get the medians.
    """

    layout: ParallelLayout
    decode: InterpolationGrid | None
    prefill: InterpolationGrid | None
    usual_decode: float
    usual_prefill: float
    label: str

    def of_decode(self, layout: ParallelLayout, batch: int, context: int) -> float:
        if self.decode is None or layout != self.layout:
            return self.usual_decode
        return self.decode.at(batch, max(1, context))

    def of_prefill(self, layout: ParallelLayout, prefill: Prefill) -> float:
        if self.prefill is None or layout != self.layout:
            return self.usual_prefill
        return self.prefill.at(prefill.prompts, prefill.tokens)


class StepModel:
    """The sum of a step's operations on one pipeline stage."""

    def __init__(
        self,
        model: Architecture,
        precision: QuantFormat,
        kv: str,
        layout: ParallelLayout,
        times: OperationTimes,
        nodes: bool = False,
        graphs: Sequence[int] = (),
    ) -> None:
        """Create the model.

        Args:
            model: The architecture.
            precision: The format of the weights.
            kv: The dtype of the KV cache.
            layout: The layout of a replica.
            times: The durations of single operations.
            nodes: True if pipeline stages are on different nodes.
            graphs: Ascending batch sizes of captured CUDA graphs. A step without prompts runs as
                the next larger one, with padding in place of the missing sequences.
        """
        self.model, self.precision, self.kv, self.layout, self.times = model, precision, kv, layout, times
        self.nodes, self.graphs = nodes, tuple(graphs)
        self.correction: MeasuredCorrection | None = None
        self.seconds = lru_cache(maxsize=4096)(self._corrected)

    def _corrected(self, batch: int, length: int, prefill: Prefill | None = None, drafts: int = 0) -> float:
        """Return `_seconds`, corrected by measured ratios.

        The parts of sequences and of prompts have one ratio each.
        """
        correction = self.correction
        if correction is None:
            return self._seconds(batch, length, prefill, drafts)
        plain = self._seconds(batch, length, None, drafts)
        if prefill is None:
            return plain * correction.of_decode(self.layout, max(1, batch), length)
        added = self._seconds(batch, length, prefill, drafts) - plain
        decode = plain * correction.of_decode(self.layout, batch, length) if batch else 0.0
        return decode + added * correction.of_prefill(self.layout, prefill)

    def _seconds(self, batch: int, length: int, prefill: Prefill | None = None, drafts: int = 0) -> float:
        """Return the seconds of a stage's step.

        Args:
            batch: Sequences that decode.
            length: Tokens of each sequence in the cache.
            prefill: Prompts that the step reads.
            drafts: Proposed tokens that each sequence checks as well.
        """
        tokens = batch * (1 + drafts) + (prefill.prompts * prefill.tokens if prefill else 0)
        answers = batch * (1 + drafts) + (prefill.prompts if prefill else 0)
        if not tokens:
            return 0.0
        if not prefill and not drafts:
            tokens = self._padded(tokens)
        stage = self._stage
        time = stage.attention * (self._attention(batch, length, prefill) + self._around_attention(tokens))
        time += stage.recurrent * self._recurrent(tokens, batch + (prefill.prompts if prefill else 0))
        time += stage.dense * self._linears(self._dense_mlp, tokens) + stage.moe * self._experts(tokens)
        time += sum(stage) * self._block(tokens)
        if drafts and batch:
            time += drafts * self._draft(batch, length)
        return time + self._first_and_last(tokens, answers) + STEP_OVERHEAD + SEQUENCE_OVERHEAD * batch

    def _padded(self, batch: int) -> int:
        """Return the captured batch size that runs for `batch` sequences.

        A batch larger than all runs as it is.
        """
        place = bisect_left(self.graphs, batch)
        return self.graphs[place] if place < len(self.graphs) else batch

    @cached_property
    def _stage(self) -> _Blocks:
        """Return the blocks of the longest pipeline stage. Each kind is spread evenly over the stages."""
        model, layers = self.model, range(self.model.num_layers)
        share = self.layout.stage_layers(model.num_layers, 0) / model.num_layers
        kinds = (model.has_attention, model.is_recurrent, model.is_dense, model.is_moe)
        return _Blocks(*(round(sum(map(has, layers)) * share) for has in kinds))

    @cached_property
    def _attention_shape(self) -> AttentionShape:
        model, tp = self.model, self.layout.tp
        compute = "fp8" if self.kv == "fp8" and self.precision.compute == "fp8" else "bf16"
        if model.mla:
            width = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
            latent = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
            return AttentionShape(model.num_heads // tp, 1, width, self.kv, compute, latent)
        return AttentionShape(model.num_heads // tp, local_kv_heads(model, tp), model.head_dim, self.kv, compute)

    def _attention(self, batch: int, length: int, prefill: Prefill | None) -> float:
        """Return the mean seconds over the layers.

        Layers with a sliding window read no more than the window.
        """
        time = 0.0
        for share, heads in self._attention_mix:
            if batch:
                time += share * self.times.decode(batch, max(1, length), heads)
            if prefill:
                time += share * self.times.prefill(prefill.prompts, prefill.tokens, prefill.prefix, heads)
        return time

    @cached_property
    def _attention_mix(self) -> list[tuple[float, AttentionShape]]:
        """Return the kinds of attention, each with its share of the layers."""
        window = self.model.sliding_window
        if window is None:
            return [(1.0, self._attention_shape)]
        local = len(window.layers) / self.model.num_layers
        return [(local, replace(self._attention_shape, window=window.size)), (1 - local, self._attention_shape)]

    def _around_attention(self, tokens: int) -> float:
        """Return the seconds of attention's matrices and rotary embedding."""
        heads = self._attention_shape.heads + self._attention_shape.kv_heads
        rope = self.times.memory(tokens * 4 * self._attention_shape.head_dim * heads)
        return self._linears(self._attention_linears, tokens) + rope

    def _block(self, tokens: int) -> float:
        """Return the seconds of what every mixer and every MLP has: a norm and an all-reduce."""
        values = tokens * self.model.hidden_size
        return self.times.memory(values * 2 * 4) + self.times.all_reduce(values, self.layout.tp)

    def _recurrent(self, tokens: int, sequences: int) -> float:
        """Estimate the seconds of a layer of linear attention or Mamba, which is bound by memory.

        Each sequence's state is read and written, and each token's vectors pass the convolution and
        the scan.
        """
        shape = self.model.recurrent
        if shape is None:
            return 0.0
        state = 2 * 4 * shape.inner_size * shape.state * sequences
        vectors = 2 * RECURRENT_PASSES * (shape.inner_size + shape.conv_size) * tokens
        moved = self.times.memory((state + vectors) / self.layout.tp)
        return moved + self._linears(self._recurrent_linears, tokens)

    @cached_property
    def _recurrent_linears(self) -> list[RankLinear]:
        return list(rank_matrices.recurrent(self.model, self.layout))

    @cached_property
    def _attention_linears(self) -> list[RankLinear]:
        return list(rank_matrices.attention(self.model, self.layout))

    @cached_property
    def _dense_mlp(self) -> list[RankLinear]:
        return list(rank_matrices.mlp(self.model, self.layout))

    def _linears(self, linears: list[RankLinear], tokens: int) -> float:
        time = 0.0
        for linear in linears:
            quantised = self.precision.name if linear.part in self.precision.parts else "none"
            time += self.times.gemm(tokens, linear.outputs, linear.inputs, quantised)
            if linear.name.endswith("gate_up"):
                time += self.times.memory(tokens * linear.outputs * 3)
        return time

    def _experts(self, tokens: int) -> float:
        """Return the seconds of router, routed experts and shared experts."""
        moe = self.model.moe
        if moe is None:
            return 0.0
        # tables are of gated experts, which have three matrices
        size = moe.moe_intermediate_size if self.model.gated_mlp else moe.moe_intermediate_size * 2 // 3
        sizes = ExpertsShape(
            moe.latent_size or self.model.hidden_size, size, moe.experts_per_token, moe.num_experts,
            self.layout.moe_tp, self.layout.ep,
        )  # fmt: skip
        others = [linear for linear in rank_matrices.experts(self.model, self.layout) if linear.part != "experts"]
        return self.times.moe(tokens, sizes, self.precision.name) + self._linears(others, tokens)

    def _draft(self, batch: int, length: int) -> float:
        """Return the seconds of one proposed token of an EAGLE-3 head.

        The head is a decoder layer and the output head.
        """
        mixer = self._around_attention(batch) + self._attention(batch, length, None)
        return mixer + self._linears(self._dense_mlp, batch) + 2 * self._block(batch) + self._head(batch)

    def _first_and_last(self, tokens: int, answers: int) -> float:
        """Return the seconds of embedding, output head and sampling.

        Only one pipeline stage has the head, and all wait for it.
        """
        embedding = self.times.memory(tokens * self.model.hidden_size * 4)
        send = self.times.send(tokens * self.model.hidden_size * 2, self.nodes) if self.layout.pp > 1 else 0.0
        return embedding + self._head(answers) + send

    def _head(self, answers: int) -> float:
        columns = rank_matrices.padded_vocab(self.model, self.layout.tp) // self.layout.tp
        logits = self.times.memory(answers * self.model.vocab_size * 4 * LOGIT_PASSES)
        return self.times.gemm(answers, columns, self.model.hidden_size, "none") + logits
