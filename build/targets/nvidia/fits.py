"""Can the GPUs that the user names run the engine?"""

from __future__ import annotations

from llmops.build.checkpoint import Checkpoint
from llmops.build.plan.gpus import find_gpu
from llmops.build.plan.precision import PRECISIONS, find_precision
from llmops.build.spec import BuildSpec
from llmops.build.targets.nvidia.needs import stored_bytes
from llmops.build.targets.nvidia.request import Request, allowed_formats
from llmops.errors import InputError

_GIB = 2**30


def check_gpu(spec: BuildSpec, checkpoint: Checkpoint, request: Request) -> None:
    """Raises InputError when they cannot run the format or hold the weights."""
    if spec.gpu is None:
        return
    gpu, count, arch = find_gpu(spec.gpu), spec.tp * spec.pp, checkpoint.architecture
    precision = find_precision("auto" if request.passed_on else request.form.name, arch)
    if gpu.sm < precision.sm:
        others = (name for name in allowed_formats(arch.family, spec.target) if PRECISIONS[name].sm <= gpu.sm)
        raise InputError(
            f"--gpu {gpu.name} has no FP8 arithmetic, which {precision.label} weights need; use a newer GPU, or "
            f"--quant {', '.join(others)}{' of the full-precision checkpoint' if request.passed_on else ''}."
        )
    stored = stored_bytes(checkpoint, request, spec.target)
    if stored > count * gpu.memory:
        raise InputError(
            f"the weights take {stored / _GIB:.0f} GiB, and {count} x {gpu.name} have {count * gpu.memory / _GIB:.0f} "
            "GiB; raise --tp or --pp, name a larger --gpu, or choose a --quant of fewer bits."
        )
