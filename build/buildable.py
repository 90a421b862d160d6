"""Would `llmops build --plan` take this plan? Asked of the targets' own rules, so that plan and build cannot disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.build.plan.buildplan import BuildPlan
from llmops.build.spec import BuildSpec
from llmops.build.targets.registry import get_target
from llmops.errors import LlmopsError

_ANYWHERE = Path("engine")


def refusal(checkpoint: Checkpoint, plan: BuildPlan) -> str | None:
    """The sentence with which a build of this plan would be refused, or None. Looks at no weights and no machine."""
    options: dict[str, Any] = {name: value for name, value in plan.build_options().items() if value is not None}
    try:
        spec = BuildSpec(checkpoint.ref, _ANYWHERE, plan=plan.to_dict(), **options)
        get_target(spec.target).validate(spec, checkpoint)
    except LlmopsError as error:
        return error.message
    return None
