"""The engine of simulated replicas: its limits, and its step times from the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llmops.build.plan.build_plan import BuildPlan
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory import kv_sizes
from llmops.build.plan.memory.memory_budget import PlannedLimits, plan_memory
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.model_lookup import look_up_model
from llmops.build.plan.speed.step_time import Prefill, StepModel
from llmops.build.plan.timing.silicon import timing_source
from llmops.build.quant_formats import FORMATS
from llmops.errors import InputError

#: Spacing of the grid on which the planner is evaluated: sequences beside a prompt, tokens of a
#: step, and cached tokens before them. A coarser grid is faster and less precise.
BESIDE, CHUNK, BEFORE = 16, 128, 2048
#: Lengths in tokens between which decode time is interpolated linearly, because the time to read
#: the KV cache grows linearly.
SHORT, LONG = 512, 8192


class StepTimes(Protocol):
    """The interface of an engine's step times. All times are in seconds."""

    def decode(self, batch: int, length: float) -> float:
        """Return the time of a decode step.

        The step generates a token for each of `batch` sequences with the mean length `length`
        (tokens).
        """
        ...

    def read(self, batch: int, length: float, tokens: int, before: int) -> float:
        """Return the time of a decode step that also reads prompt tokens.

        Args:
            batch: Number of sequences that get a token.
            length: Mean length of the sequences in tokens.
            tokens: Number of prompt tokens that the step reads.
            before: Number of cached tokens before these prompt tokens.
        """
        ...


class PlannedStepTimes:
    """The planner's step times on a grid. Each point is computed once."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._lines: dict[int, tuple[float, float]] = {}
        self._reading: dict[tuple[int, int, int], float] = {}

    def decode(self, batch: int, length: float) -> float:
        line = self._lines.get(batch)
        if line is None:
            short, long = self._model.seconds(batch, SHORT), self._model.seconds(batch, LONG)
            slope = (long - short) / (LONG - SHORT)
            line = self._lines[batch] = (short - slope * SHORT, slope)
        return line[0] + line[1] * length

    def read(self, batch: int, length: float, tokens: int, before: int) -> float:
        beside = -(-batch // BESIDE) * BESIDE
        low = tokens // CHUNK
        first, second = self._added(beside, low, before // BEFORE), self._added(beside, low + 1, before // BEFORE)
        added = first + (second - first) * (tokens - low * CHUNK) / CHUNK
        return added + self.decode(batch, length) if batch else added

    def _added(self, beside: int, chunk: int, before: int) -> float:
        """Return the seconds that prompt tokens add to a step.

        Without other sequences, the result is the seconds of the whole step.

        Args:
            beside: The number of other sequences, which get one token each.
            chunk: The number of prompt tokens, as a multiple of CHUNK.
            before: The number of cached tokens before the prompt tokens, as a multiple of BEFORE.
        """
        key = (beside, chunk, before)
        known = self._reading.get(key)
        if known is None:
            prefill = Prefill(1, max(chunk * CHUNK, 1), before * BEFORE)
            plain = self._model.seconds(beside, LONG // 4) if beside else 0.0
            known = self._reading[key] = self._model.seconds(beside, LONG // 4, prefill) - plain
        return known


@dataclass(frozen=True)
class LinearStepTimes:
    """Linear step times, for experiments.

    A step takes a constant time, plus times per sequence, per prompt token and per cached token.
    """

    step: float = 0.01
    sequence: float = 0.0
    prompt_token: float = 0.00005
    cached_token: float = 0.0

    def decode(self, batch: int, length: float) -> float:
        return self.step + batch * (self.sequence + length * self.cached_token)

    def read(self, batch: int, length: float, tokens: int, before: int) -> float:
        return self.decode(batch, length) + tokens * self.prompt_token


@dataclass(frozen=True)
class EngineSpec:
    """The engine of a replica.

    Attributes:
        steps: The step times.
        blocks: Number of blocks of the KV cache.
        block_tokens: Tokens of a block.
        max_batch_size: Maximum number of sequences in a step.
        max_num_tokens: Maximum number of tokens in a step.
        gpus: Number of GPUs of the replica.
        price: Price of a GPU in dollars per hour.
        name: The name in reports.
    """

    steps: StepTimes
    blocks: int
    block_tokens: int = 64
    max_batch_size: int = 128
    max_num_tokens: int = 8192
    gpus: int = 1
    price: float = 0.0
    name: str = "engine"


def make_engine_spec(plan: BuildPlan, block_tokens: int) -> EngineSpec:
    """Return the engine of a plan.

    The step times come from measured tables, unless the plan was made with the roofline model.

    Raises:
        InputError: The plan does not fit on its GPUs.
    """
    model = look_up_model(plan.model).checkpoint.architecture
    gpu, precision = find_gpu(plan.gpu), FORMATS[plan.quantisation]
    layout = ParallelLayout(plan.tp_size, plan.pp_size, plan.ep_size)
    limits = PlannedLimits(plan.max_batch_size, plan.max_num_tokens, plan.max_seq_len, plan.kv_cache_fraction)
    memory = plan_memory(model, precision, plan.kv_cache_dtype, layout, gpu, limits)
    blocks = memory.kv_cache // (kv_sizes.token_bytes(model, plan.kv_cache_dtype, layout) * block_tokens)
    if not memory.fits or blocks < 1:
        raise InputError(
            f"{plan.model} does not fit on {layout.gpus} x {gpu.name}; make a plan that fits with `llmops plan`."
        )
    timing = "roofline" if str(plan.predicted.get("timing")).startswith("roofline") else "auto"
    steps = StepModel(
        model, precision, plan.kv_cache_dtype, layout, timing_source(gpu, timing), layout.gpus > gpu.per_node
    )
    return EngineSpec(
        PlannedStepTimes(steps),
        blocks,
        block_tokens,
        plan.max_batch_size,
        plan.max_num_tokens,
        layout.gpus,
        gpu.price,
        f"{plan.model}, {plan.quantisation}, {layout} on {gpu.name}",
    )
