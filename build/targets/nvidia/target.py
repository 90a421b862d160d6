"""What both targets of NVIDIA have in common: ModelOpt quantises, here, and the engine runs elsewhere."""

from __future__ import annotations

from abc import abstractmethod

from llmops.build.checkpoint import Checkpoint
from llmops.build.plan.gpus import find_gpu
from llmops.build.spec import BuildSpec
from llmops.build.targets.base import Target
from llmops.build.targets.nvidia.needs import (
    HEADER,
    OTHER_FILES,
    StageNeed,
    check_memory,
    needs,
    planned_on_gpu,
    recorded_bytes,
    stored_bytes,
)
from llmops.build.targets.nvidia.quantised import kept_bytes, library_versions
from llmops.build.targets.nvidia.request import Request, make_request


class NvidiaTarget(Target):
    """`copies` is how often the weights are written."""

    copies = 1

    def check_machine(self, spec: BuildSpec, checkpoint: Checkpoint) -> None:
        request = make_request(spec, checkpoint)
        if not request.copied:
            from llmops.build.quantize.loading import has_gpu, require_quantize_extra

            require_quantize_extra()
            gpu = has_gpu()
            check_memory(needs(checkpoint, request, self.name, spec.tp, spec.pp, gpu), gpu)

    def disk_bytes(self, spec: BuildSpec, checkpoint: Checkpoint) -> int:
        request = make_request(spec, checkpoint)
        recorded = recorded_bytes(checkpoint) if request.measure_quality else 0
        return self.copies * stored_bytes(checkpoint, request, self.name) + recorded + OTHER_FILES

    def kept_bytes(self, spec: BuildSpec, checkpoint: Checkpoint) -> int:
        return kept_bytes(spec, checkpoint, make_request(spec, checkpoint))

    def versions(self) -> dict[str, str]:
        return library_versions()

    def plan_lines(self, spec: BuildSpec, checkpoint: Checkpoint) -> list[str]:
        request = make_request(spec, checkpoint)
        gpu = planned_on_gpu(spec)
        stages = needs(checkpoint, request, self.name, spec.tp, spec.pp, gpu and not request.copied)
        commands = [line for part in self.commands(spec, checkpoint, request) for line in (part, "")]
        table = [HEADER, *(stage.line() for stage in stages), *_too_large(spec, stages)]
        return [*_quantising(request, gpu), "", *table, "", *commands]

    @abstractmethod
    def commands(self, spec: BuildSpec, checkpoint: Checkpoint, request: Request) -> list[str]:
        """What the engine is built or started with, for people. Raises InputError."""


def _quantising(request: Request, gpu: bool) -> list[str]:
    """How it will be calibrated and what it may cost, where that is known beforehand."""
    lines = [f"scales groups of {request.group_size} inputs"] if request.group_size else []
    if request.form.calibrated or request.kv_cache != "auto":
        lines.append(request.calibration.describe(gpu, request.form.calib_limit))
    return lines + ([f"quality gate: {request.gates.describe()}"] if request.measure_quality else [])


def _too_large(spec: BuildSpec, stages: list[StageNeed]) -> list[str]:
    """The stages that the engine's own GPUs have no memory for."""
    if spec.gpu is None:
        return []
    gpu, count = find_gpu(spec.gpu), spec.tp * spec.pp
    names = [stage.stage for stage in stages if stage.gpu > count * gpu.memory]
    if not names:
        return []
    have = f"{count} x {gpu.name} ({count * gpu.memory / 2**30:.0f} GiB)"
    return [f"more than {have} can hold: {', '.join(names)}; run `llmops build` with more GPUs, or on CPU"]
