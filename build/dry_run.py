"""`llmops build --dry-run`: what would be done and what it needs; touches nothing, and config.json is enough."""

from __future__ import annotations

from dataclasses import replace

from llmops.build.checkpoint import Checkpoint, open_checkpoint
from llmops.build.checkpoint.base import TensorInfo
from llmops.build.plan.precision import PRECISIONS, find_precision
from llmops.build.plan.weights import checkpoint_weights
from llmops.build.spec import BuildSpec
from llmops.build.targets.base import Target
from llmops.build.targets.registry import get_target
from llmops.errors import MissingDependencyError, ResourceError


def describe(spec: BuildSpec) -> str:
    """The plan as text. Raises what the build itself would raise for what was asked; what only this machine lacks is
    said in the plan."""
    checkpoint = _with_size(open_checkpoint(spec.checkpoint, weights=False))
    target = get_target(spec.target)
    target.validate(spec, checkpoint)
    arch = checkpoint.architecture
    lines = [
        f"{checkpoint.ref}: {arch.hf_class}, {_count(checkpoint.parameters)} parameters, {arch.dtype}",
        f"target {spec.target}, weights {spec.quant}, KV cache {spec.kv_cache}, tp {spec.tp}, pp {spec.pp}",
        f"writes up to {target.disk_bytes(spec, checkpoint) / 2**30:.1f} GiB to {spec.output}",
        *_here(spec, checkpoint, target),
        *target.plan_lines(spec, checkpoint),
    ]
    return "\n".join(lines).rstrip()


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.0f} million"


def _with_size(checkpoint: Checkpoint) -> Checkpoint:
    """Where there is no weight file, the number of parameters comes from the shapes in config.json."""
    if checkpoint.tensors:
        return checkpoint
    arch = checkpoint.architecture
    count = sum(checkpoint_weights(arch, PRECISIONS["none"]).values()) // (4 if arch.dtype == "float32" else 2)
    stored = sum(checkpoint_weights(arch, find_precision("auto", arch)).values())
    return replace(checkpoint, tensors={"all": TensorInfo("all", (count,), arch.dtype, stored, "", 0)})


def _here(spec: BuildSpec, checkpoint: Checkpoint, target: Target) -> list[str]:
    try:
        target.check_machine(spec, checkpoint)
    except (MissingDependencyError, ResourceError) as error:
        return [f"not on this machine: {error.message}"]
    return []
