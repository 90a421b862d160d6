"""`llmops build --dry-run`: what would be done and what it needs; touches nothing, and config.json is enough."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llmops.build.checkpoint import Checkpoint, open_checkpoint
from llmops.build.checkpoint.base import TensorInfo
from llmops.build.encoder import open_encoder
from llmops.build.formats import FORMATS
from llmops.build.job.engine import prepare
from llmops.build.plan.memory.weights import checkpoint_weights
from llmops.build.plan.precision import find_precision
from llmops.build.spec import BuildSpec
from llmops.build.targets.base import Job
from llmops.errors import InputError, MissingDependencyError, ResourceError, VersionMismatchError


class DryRun(NamedTuple):
    """What would be done. `missing`: what only this machine lacks; `steps`: the target's own plan, line by line."""

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
        lines = [
            f"{self.checkpoint}: {self.architecture}, {_count(self.parameters)} parameters, {self.dtype}",
            f"target {self.target}, weights {self.quant}, KV cache {self.kv_cache}, tp {self.tp}, pp {self.pp}",
            f"writes up to {self.disk_bytes / 2**30:.1f} GiB to {self.output}",
            *(f"not on this machine: {what}" for what in self.missing),
            *self.steps,
        ]
        return "\n".join(lines).rstrip()


def dry_run(spec: BuildSpec) -> DryRun:
    """Raises what the build itself would raise for a spec that does not fit; what only this machine lacks is said.

    Tokenizer and weights are not looked at: config.json is enough.
    """
    if open_encoder(spec.checkpoint) is not None:
        raise InputError(f"{spec.checkpoint} is an embedding model, which is built in seconds; leave --dry-run out.")
    checkpoint = _with_size(open_checkpoint(spec.checkpoint, weights=False))
    job = prepare(spec, checkpoint)
    arch = checkpoint.architecture
    return DryRun(
        checkpoint=checkpoint.ref,
        architecture=arch.hf_class,
        parameters=checkpoint.parameters,
        dtype=arch.dtype,
        target=spec.target,
        quant=spec.quant,
        kv_cache=spec.kv_cache,
        tp=spec.tp,
        pp=spec.pp,
        output=str(spec.output),
        disk_bytes=job.disk_bytes,
        missing=_missing(job),
        steps=job.lines,
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.0f} million"


def _with_size(checkpoint: Checkpoint) -> Checkpoint:
    """Where there is no weight file, the number of parameters comes from the shapes in config.json."""
    if checkpoint.tensors:
        return checkpoint
    arch = checkpoint.architecture
    count = sum(checkpoint_weights(arch, FORMATS["none"]).values()) // (4 if arch.dtype == "float32" else 2)
    stored = sum(checkpoint_weights(arch, find_precision("auto", arch)).values())
    return replace(checkpoint, tensors={"all": TensorInfo("all", (count,), arch.dtype, stored, "", 0)})


def _missing(job: Job) -> list[str]:
    try:
        job.check()
    except (MissingDependencyError, ResourceError, VersionMismatchError) as error:
        return [error.message]
    return []
