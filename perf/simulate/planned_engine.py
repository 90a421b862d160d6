"""The replica that a build plan describes, at the planner's pace."""

from __future__ import annotations

from llmops.build.plan.build_plan import BuildPlan
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory import kv_sizes
from llmops.build.plan.memory.memory_budget import PlannedLimits, plan_memory
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.model_lookup import look_up_model
from llmops.build.plan.speed.step_time import StepModel
from llmops.build.plan.timing.silicon import timing_source
from llmops.build.quant_formats import FORMATS
from llmops.errors import InputError
from llmops.perf.simulate.replica import EngineSpec
from llmops.perf.simulate.step_times import PlannedStepTimes


def make_engine_spec(plan: BuildPlan, block_tokens: int) -> EngineSpec:
    """Return one replica of a plan, by measured tables unless the plan was made by the roofline.

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
        raise InputError(f"{plan.model} does not fit on {layout.gpus} x {gpu.name}; make another plan.")
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
