"""Describe a build without starting it (`llmops build --dry-run`), or check a plan in this way.

The dry run and the check call the `prepare` of the build's target, so the planner never recommends
an engine that the build rejects. Only config.json is needed: no weights are read, and no files are
written.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.description import TensorInfo
from llmops.build.encoder import EncoderCheckpoint
from llmops.build.job.build_engine import open_model, prepare
from llmops.build.plan.build_plan import BuildPlan
from llmops.build.plan.memory.weight_bytes import checkpoint_weights
from llmops.build.plan.search.plan_request import ENGINE, TORCH, default_target, find_precision
from llmops.build.quant_formats import FORMATS, QuantFormat
from llmops.build.spec import BuildSpec
from llmops.build.targets.build_target import TargetJob, get_target
from llmops.errors import LlmopsError, MissingDependencyError, ResourceError, VersionMismatchError


class DryRun(NamedTuple):
    """A description of a build's work.

    `disk_bytes` is the size of the output and of temporary files. `missing` has a sentence for each
    package or device that this machine lacks. `steps` are the lines in which the target describes
    its work.
    """

    checkpoint: str
    architecture: str
    parameters: int
    dtype: str
    target: str
    quant: str
    kv_cache: str
    tp: int
    pp: int
    output: str
    disk_bytes: int
    missing: list[str]
    steps: list[str]

    def text(self) -> str:
        """Return the description as the lines that the terminal shows."""
        lines = [
            f"{self.checkpoint}: {self.architecture}, {_count(self.parameters)} parameters, {self.dtype}",
            f"target {self.target}, weights {self.quant}, KV cache {self.kv_cache}, tp {self.tp}, pp {self.pp}",
            f"writes up to {self.disk_bytes / 2**30:.1f} GiB to {self.output}",
            *(f"not on this machine: {what}" for what in self.missing),
            *self.steps,
        ]
        return "\n".join(lines).rstrip()


def dry_run(spec: BuildSpec) -> DryRun:
    """Describe a build without starting it.

    Neither tokenizer nor weights are read: config.json is enough, except for an encoder.

    Raises:
        LlmopsError: The build itself would reject the specification or the checkpoint.
    """
    job = prepare_dry_run(spec)
    checkpoint = job.checkpoint
    return DryRun(
        checkpoint=checkpoint.ref,
        architecture=checkpoint.hf_class,
        parameters=checkpoint.parameters,
        dtype=checkpoint.dtype,
        target=spec.target,
        quant=spec.quant,
        kv_cache=spec.kv_cache,
        tp=spec.tp,
        pp=spec.pp,
        output=str(spec.output),
        disk_bytes=job.disk_bytes,
        missing=_missing(job),
        steps=job.dry_run_lines,
    )


def prepare_dry_run(spec: BuildSpec) -> TargetJob[Any]:
    """Return the job of a build whose checkpoint may be a config.json alone.

    The job knows the disk space and packages that its stages need.

    Raises:
        LlmopsError: The build itself would reject the specification or the checkpoint.
    """
    return prepare(spec, _with_size(open_model(spec.checkpoint, weights=False)))


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.0f} million"


def _with_size(checkpoint: Checkpoint | EncoderCheckpoint) -> Checkpoint | EncoderCheckpoint:
    """Add the number of parameters to a checkpoint without weight files.

    The number is computed from config.json.
    """
    if checkpoint.tensors or isinstance(checkpoint, EncoderCheckpoint):
        return checkpoint
    arch = checkpoint.architecture
    count = sum(checkpoint_weights(arch, FORMATS["none"]).values()) // (4 if arch.dtype == "float32" else 2)
    stored = sum(checkpoint_weights(arch, find_precision("auto", arch)).values())
    return replace(checkpoint, tensors={"all": TensorInfo("all", (count,), arch.dtype, stored, "", 0)})


def _missing(job: TargetJob[Any]) -> list[str]:
    """Return a sentence for each package or device that the build needs and this machine lacks."""
    try:
        job.check()
    except (MissingDependencyError, ResourceError, VersionMismatchError) as error:
        return [error.message]
    return []


#: Output of specifications that are checked and never built.
_ANYWHERE = Path("engine")


def build_problem(checkpoint: Checkpoint, plan: BuildPlan) -> str | None:
    """Return the error message with which a build would reject this plan, or None.

    The check reads no weights and ignores this machine's devices and packages.
    """
    return _rejection(checkpoint, plan=plan.to_dict(), **plan.build_options())


def gpu_target(checkpoint: Checkpoint, precision: QuantFormat, kv: str, ep: int = 1) -> str:
    """Return the default target of a plan.

    The result is the planner's choice, or pytorch if no TensorRT engine of this family and
    precision can be built.
    """
    first, model = default_target(checkpoint.architecture, precision, kv, ep), checkpoint.architecture
    if first != ENGINE or TORCH not in model.targets:
        return first
    cache = "auto" if kv == "bf16" else kv
    return TORCH if _rejection(checkpoint, target=ENGINE, quant=precision.name, kv_cache=cache) else first


def _rejection(checkpoint: Checkpoint, **options: Any) -> str | None:
    """Return the error message with which a build with these options would fail, or None."""
    try:
        spec = BuildSpec(checkpoint.ref, _ANYWHERE, **{k: v for k, v in options.items() if v is not None})
        get_target(spec.target).prepare(spec, checkpoint)
    except LlmopsError as error:
        return error.message
    return None
