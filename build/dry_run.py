"""`llmops build --dry-run`: what would be done and what it needs; touches nothing."""

from __future__ import annotations

from llmops.build.checkpoint import open_checkpoint
from llmops.build.spec import BuildSpec
from llmops.build.targets.registry import get_target


def describe(spec: BuildSpec) -> str:
    """The plan as text. Raises what the build itself would raise before it starts."""
    checkpoint = open_checkpoint(spec.checkpoint)
    target = get_target(spec.target)
    target.validate(spec, checkpoint)
    arch = checkpoint.architecture
    lines = [
        f"{checkpoint.ref}: {arch.hf_class}, {checkpoint.parameters / 1e9:.2f} billion parameters, {arch.dtype}",
        f"target {spec.target}, weights {spec.quant}, KV cache {spec.kv_cache}, tp {spec.tp}, pp {spec.pp}",
        f"writes up to {target.disk_bytes(spec, checkpoint) / 2**30:.1f} GiB to {spec.output}",
    ]
    plan_lines = getattr(target, "plan_lines", None)
    if plan_lines is not None:
        from llmops.build.targets.nvidia.needs import HEADER

        stages, commands = plan_lines(spec, checkpoint)
        lines += ["", HEADER, *(stage.line() for stage in stages), ""]
        lines += [command for part in commands for command in (part, "")]
    return "\n".join(lines).rstrip()
