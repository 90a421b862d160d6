"""Correct predicted step times by the measured step times of a host."""

import math
from collections.abc import Callable
from statistics import median

from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.speed.measured_steps import MeasuredSteps, StepTime
from llmops.build.plan.speed.step_time import MeasuredCorrection, Prefill, StepModel
from llmops.build.plan.timing.interpolation import InterpolationGrid
from llmops.errors import InputError


def measured_correction(
    measured: MeasuredSteps, request: PlanRequest, steps_of: Callable[[ParallelLayout], StepModel]
) -> MeasuredCorrection:
    """Return the ratios of measured to predicted seconds, by which predictions are corrected.

    Args:
        measured: The measured step times of a host.
        request: The request to the planner.
        steps_of: A function that returns the uncorrected step model of a layout on the measured
            GPU.

    Raises:
        InputError: The step times are of another model, precision or GPU than the request.
    """
    _check(measured, request)
    ranks = measured.layout
    layout = ParallelLayout(ranks.tp_size, ranks.pp_size, ranks.ep_size)
    steps = steps_of(layout)
    decode: dict[tuple[int, ...], float] = {
        (s.batch_size, _nearest_power(s.context)): s.seconds / _decode(steps, s) for s in measured.of_phase("decode")
    }
    prefill: dict[tuple[int, ...], float] = {
        (s.batch_size, _tokens_each(s)): s.seconds / _prefill(steps, s) for s in measured.of_phase("prefill")
    }
    by_decode, by_prefill = (median(ratios.values()) if ratios else None for ratios in (decode, prefill))
    usual = by_decode or by_prefill or 1.0
    factors = [f"{name} x{ratio:.2f}" for name, ratio in (("decode", by_decode), ("prefill", by_prefill)) if ratio]
    return MeasuredCorrection(
        layout,
        InterpolationGrid(decode) if decode else None,
        InterpolationGrid(prefill) if prefill else None,
        by_decode or usual,
        by_prefill or usual,
        f"corrected by {len(measured.steps)} steps measured on {measured.device}, {layout} ({', '.join(factors)})",
    )


def _decode(steps: StepModel, step: StepTime) -> float:
    """Return the predicted seconds of a decode step.

    Pipeline stages divide the batch into micro-batches, which run one after the other.
    """
    stages = steps.layout.pp
    return stages * steps.seconds(max(1, round(step.batch_size / stages)), max(1, step.context))


def _prefill(steps: StepModel, step: StepTime) -> float:
    return steps.layout.pp * steps.seconds(0, 0, Prefill(step.batch_size, _tokens_each(step), step.context))


def _nearest_power(context: int) -> int:
    """Return the nearest power of two, so that similar contexts share a column of the grid."""
    return int(2 ** round(math.log2(max(1, context))))


def _tokens_each(step: StepTime) -> int:
    return max(1, step.tokens // step.batch_size)


def _check(measured: MeasuredSteps, request: PlanRequest) -> None:
    known = [gpu.name for gpu in request.gpus]
    if measured.gpu not in known:
        raise InputError(
            f"--measured was taken on {measured.device} ({measured.gpu or 'no GPU that plan knows'}), and the plan is "
            f"for {', '.join(known)}; leave --measured out, or plan for the GPU that was measured."
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
