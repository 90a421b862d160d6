"""Compute the duration of one engine step.

A step adds a token to each sequence of a batch, and reads prompts.
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

#: Seconds per step in which the GPU waits for work of the host, fitted to NVIDIA's published
#: throughput on H100 (perf/lab/plan_accuracy.py).
STEP_OVERHEAD = 1.5e-3
#: Seconds of host work per sequence and step (sampling results, stop checks, scheduling), fitted to
#: NVIDIA's published throughput on H100 (perf/lab/plan_accuracy.py).
SEQUENCE_OVERHEAD = 2.0e-6
#: Number of passes over the FP32 logits of a step: copy, penalties, soft-max, draw.
LOGIT_PASSES = 4
#: Number of passes of a recurrent layer over its vectors: convolution, scan and gate each read and
#: write the vectors.
RECURRENT_PASSES = 6


class _Blocks(NamedTuple):
    """The numbers of blocks of each kind: mixers (attention, recurrent) and MLPs (dense, moe)."""

    attention: int
    recurrent: int
    dense: int
    moe: int


@dataclass(frozen=True)
class Prefill:
    """The prompts of a step.

    Each of `prompts` has `tokens` new tokens after `prefix` cached tokens.
    """

    prompts: int
    tokens: int
    prefix: int = 0


@dataclass(frozen=True)
class MeasuredCorrection:
    """The ratios of measured to predicted seconds of one engine's steps.

    `decode` is a grid by batch and context, and `prefill` a grid by sequences and new tokens of
    each sequence. A phase that was not measured is None. The grids hold for `layout`, the measured
    layout. Other layouts get the medians `usual_decode` and `usual_prefill`.
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
    """A model of an engine step: the sum of all operations on one pipeline stage."""

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
            model: The architecture of the decoder.
            precision: The format of the weights.
            kv: The dtype of the KV cache.
            layout: The layout of a replica.
            times: The durations of single operations on the GPU.
            nodes: True if pipeline stages are on different nodes.
            graphs: The batch sizes of captured CUDA graphs, in ascending order. A step without
                prompts runs the graph of the next larger size, with padding in place of the missing
                sequences.
        """
        self.model, self.precision, self.kv, self.layout, self.times = model, precision, kv, layout, times
        self.nodes, self.graphs = nodes, tuple(graphs)
        self.correction: MeasuredCorrection | None = None
        self.seconds = lru_cache(maxsize=4096)(self._corrected)

    def _corrected(self, batch: int, length: int, prefill: Prefill | None = None, drafts: int = 0) -> float:
        """Return the seconds of a stage's step, corrected by measured ratios.

        The part for decoding sequences and the part for prompts have one ratio each. `_seconds`
        describes the arguments.
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
            batch: The number of sequences that decode.
            length: The number of tokens of each sequence in the KV cache.
            prefill: The prompts that the step reads.
            drafts: The number of draft tokens that each sequence verifies.
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
        """Return the batch size of the CUDA graph that runs for `batch` sequences.

        A batch that is larger than all graphs runs without padding.
        """
        place = bisect_left(self.graphs, batch)
        return self.graphs[place] if place < len(self.graphs) else batch

    @cached_property
    def _stage(self) -> _Blocks:
        """Return the blocks of the longest pipeline stage.

        Stages share each kind of block evenly.
        """
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
        """Return the seconds of attention in one layer, the mean over the layers.

        Layers with a sliding window read only the tokens in the window.
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
        """Return the kinds of attention, each with the share of the layers that have this kind."""
        window = self.model.sliding_window
        if window is None:
            return [(1.0, self._attention_shape)]
        local = len(window.layers) / self.model.num_layers
        return [(local, replace(self._attention_shape, window=window.size)), (1 - local, self._attention_shape)]

    def _around_attention(self, tokens: int) -> float:
        """Return the seconds of the matrices and the rotary embedding of attention in one layer."""
        heads = self._attention_shape.heads + self._attention_shape.kv_heads
        rope = self.times.memory(tokens * 4 * self._attention_shape.head_dim * heads)
        return self._linears(self._attention_linears, tokens) + rope

    def _block(self, tokens: int) -> float:
        """Return the seconds of the norm and the all-reduce of one mixer or MLP for `tokens`."""
        values = tokens * self.model.hidden_size
        return self.times.memory(values * 2 * 4) + self.times.all_reduce(values, self.layout.tp)

    def _recurrent(self, tokens: int, sequences: int) -> float:
        """Estimate the seconds of a layer of linear attention or Mamba, which is bound by memory.

        The layer reads and writes the state of each sequence. The vectors of each token pass the
        convolution and the scan.
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
        """Return the seconds of router, routed experts and shared experts in one layer."""
        moe = self.model.moe
        if moe is None:
            return 0.0
        # The tables were measured with gated experts, which have three matrices.
        size = moe.moe_intermediate_size if self.model.gated_mlp else moe.moe_intermediate_size * 2 // 3
        sizes = ExpertsShape(
            moe.latent_size or self.model.hidden_size, size, moe.experts_per_token, moe.num_experts,
            self.layout.moe_tp, self.layout.ep,
        )  # fmt: skip
        others = [linear for linear in rank_matrices.experts(self.model, self.layout) if linear.part != "experts"]
        return self.times.moe(tokens, sizes, self.precision.name) + self._linears(others, tokens)

    def _draft(self, batch: int, length: int) -> float:
        """Return the seconds of one draft token of an EAGLE-3 head.

        The head consists of a decoder layer and an output head.
        """
        mixer = self._around_attention(batch) + self._attention(batch, length, None)
        return mixer + self._linears(self._dense_mlp, batch) + 2 * self._block(batch) + self._head(batch)

    def _first_and_last(self, tokens: int, answers: int) -> float:
        """Return the seconds of embedding `tokens` tokens, and of output head and sampling.

        The output head and sampling compute `answers` tokens. Only one pipeline stage has the
        output head, and all stages wait for it.
        """
        embedding = self.times.memory(tokens * self.model.hidden_size * 4)
        send = self.times.send(tokens * self.model.hidden_size * 2, self.nodes) if self.layout.pp > 1 else 0.0
        return embedding + self._head(answers) + send

    def _head(self, answers: int) -> float:
        columns = rank_matrices.padded_vocab(self.model, self.layout.tp) // self.layout.tp
        logits = self.times.memory(answers * self.model.vocab_size * 4 * LOGIT_PASSES)
        return self.times.gemm(answers, columns, self.model.hidden_size, "none") + logits
