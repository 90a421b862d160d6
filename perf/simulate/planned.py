"""The replica that a build plan describes, at the planner's pace."""

from __future__ import annotations

from llmops.build.formats import FORMATS
from llmops.build.plan.buildplan import BuildPlan
from llmops.build.plan.gpus import find_gpu
from llmops.build.plan.memory import kv
from llmops.build.plan.memory.budget import PlannedLimits, plan_memory
from llmops.build.plan.memory.layout import Layout
from llmops.build.plan.source import load_model
from llmops.build.plan.speed.step import StepModel
from llmops.build.plan.timing.choose import op_times
from llmops.errors import InputError
from llmops.perf.simulate.replica import EngineSpec
from llmops.perf.simulate.steps import PlannedSteps


def engine_of(plan: BuildPlan, block_tokens: int) -> EngineSpec:
    """Return one replica of a plan, by measured tables unless the plan was made by the roofline.

    Raises:
        InputError: The plan does not fit on its GPUs.
    """
    model = load_model(plan.model).checkpoint.architecture
    gpu, precision = find_gpu(plan.gpu), FORMATS[plan.quantisation]
    layout = Layout(plan.tp_size, plan.pp_size, plan.ep_size)
    limits = PlannedLimits(plan.max_batch_size, plan.max_num_tokens, plan.max_seq_len, plan.kv_cache_fraction)
    memory = plan_memory(model, precision, plan.kv_cache_dtype, layout, gpu, limits)
    blocks = memory.kv_cache // (kv.token_bytes(model, plan.kv_cache_dtype, layout) * block_tokens)
    if not memory.fits or blocks < 1:
        raise InputError(f"{plan.model} does not fit on {layout.gpus} x {gpu.name}; make another plan.")
    timing = "roofline" if str(plan.predicted.get("timing")).startswith("roofline") else "auto"
    steps = StepModel(model, precision, plan.kv_cache_dtype, layout, op_times(gpu, timing), layout.gpus > gpu.per_node)
    return EngineSpec(
        PlannedSteps(steps),
        blocks,
        block_tokens,
        plan.max_batch_size,
        plan.max_num_tokens,
        layout.gpus,
        gpu.price,
        f"{plan.model}, {plan.quantisation}, {layout} on {gpu.name}",
    )
