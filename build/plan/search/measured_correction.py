"""What a host's own step times say about the model of a step: ratios by which its predictions are corrected."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.speed.measured_steps import MeasuredSteps, StepTime
from llmops.build.plan.speed.step_time import Prefill, StepModel
from llmops.build.plan.timing.interpolation import InterpolationGrid
from llmops.errors import InputError


@dataclass(frozen=True)
class MeasuredCorrection:
    """Measured over predicted seconds of one engine: `decode` by (batch, context), `prefill` by (sequences, new tokens
    of each), None where that phase was not measured; `layout` is the one measured. Other layouts get the medians."""

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


def measured_correction(
    measured: MeasuredSteps, request: PlanRequest, steps_of: Callable[[ParallelLayout], StepModel]
) -> MeasuredCorrection:
    """`steps_of` gives the uncorrected model of a layout on the measured GPU. Raises InputError for a file of another
    model, precision or GPU than is planned."""
    _check(measured, request)
    ranks = measured.layout
    layout = ParallelLayout(ranks.tp_size, ranks.pp_size, ranks.ep_size)
    steps = steps_of(layout)
    decode: dict[tuple[int, ...], float] = {
        (s.batch_size, _about(s.context)): s.seconds / _decode(steps, s) for s in measured.of_phase("decode")
    }
    prefill: dict[tuple[int, ...], float] = {
        (s.batch_size, _each(s)): s.seconds / _prefill(steps, s) for s in measured.of_phase("prefill")
    }
    by_decode, by_prefill = (median(ratios.values()) if ratios else None for ratios in (decode, prefill))
    usual = by_decode or by_prefill or 1.0
    said = [f"{name} x{ratio:.2f}" for name, ratio in (("decode", by_decode), ("prefill", by_prefill)) if ratio]
    return MeasuredCorrection(
        layout,
        InterpolationGrid(decode) if decode else None,
        InterpolationGrid(prefill) if prefill else None,
        by_decode or usual,
        by_prefill or usual,
        f"corrected by {len(measured.steps)} steps measured on {measured.device}, {layout} ({', '.join(said)})",
    )


def _decode(steps: StepModel, step: StepTime) -> float:
    """With pipeline stages the batch is cut into as many micro-batches, which follow one another."""
    stages = steps.layout.pp
    return stages * steps.seconds(max(1, round(step.batch_size / stages)), max(1, step.context))


def _prefill(steps: StepModel, step: StepTime) -> float:
    return steps.layout.pp * steps.seconds(0, 0, Prefill(step.batch_size, _each(step), step.context))


def _about(context: int) -> int:
    """A power of two: contexts that differ a little from batch to batch are one column of the grid."""
    return int(2 ** round(math.log2(max(1, context))))


def _each(step: StepTime) -> int:
    return max(1, step.tokens // step.batch_size)


def _check(measured: MeasuredSteps, request: PlanRequest) -> None:
    known = [gpu.name for gpu in request.gpus]
    if measured.gpu not in known:
        raise InputError(
            f"--measured is of {measured.device} ({measured.gpu or 'no GPU that plan knows'}), and the plan is for "
            f"{', '.join(known)}; leave --measured out, or plan for the GPU that was measured."
        )
    engine = "none" if request.precision.as_stored else request.precision.name
    wrong = [
        f"{what} {has}, not {planned}"
        for what, has, planned, same in (
            ("architecture", measured.architecture, request.model.hf_class, False),
            ("weights", measured.quantisation, request.precision.label, measured.quantisation == engine),
            ("KV cache", measured.kv_cache_dtype, request.kv, measured.kv_cache_dtype == "auto"),
        )
        if has != planned and not same
    ]
    if wrong:
        raise InputError(
            f"--measured is of another engine ({'; '.join(wrong)}); plan with the same model, --quant and --kv-dtype, "
            "or leave --measured out."
        )
