"""Would `llmops build --plan` take this plan? The targets' own rules are asked, so plan and build cannot disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.build.plan.build_plan import BuildPlan
from llmops.build.plan.search.plan_request import ENGINE, TORCH, default_target
from llmops.build.quant_formats import QuantFormat
from llmops.build.spec import BuildSpec
from llmops.build.targets.target_registry import get_target
from llmops.errors import LlmopsError

_ANYWHERE = Path("engine")


def build_problem(checkpoint: Checkpoint, plan: BuildPlan) -> str | None:
    """The sentence with which a build of this plan would be refused, or None. Looks at no weights and no machine."""
    return _refused(checkpoint, plan=plan.to_dict(), **plan.build_options())


def gpu_target(checkpoint: Checkpoint, precision: QuantFormat, kv: str, ep: int = 1) -> str:
    """The target that a plan is for when the user names none: the planner's choice, or pytorch where an engine of
    this family and precision cannot be built."""
    first, model = default_target(checkpoint.architecture, precision, kv, ep), checkpoint.architecture
    if first != ENGINE or TORCH not in model.targets:
        return first
    cache = "auto" if kv == "bf16" else kv
    return TORCH if _refused(checkpoint, target=ENGINE, quant=precision.name, kv_cache=cache) else first


def _refused(checkpoint: Checkpoint, **options: Any) -> str | None:
    try:
        spec = BuildSpec(checkpoint.ref, _ANYWHERE, **{k: v for k, v in options.items() if v is not None})
        get_target(spec.target).prepare(spec, checkpoint)
    except LlmopsError as error:
        return error.message
    return None
