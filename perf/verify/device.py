"""The accelerators of this host, as nvidia-smi says; elsewhere the CPU."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from llmops.perf.report.document import machine

_FIELDS = "name,clocks.sm,clocks.max.sm,memory.total,memory.used"


@dataclass(frozen=True)
class HostGpu:
    """Clocks in MHz, memory in MiB."""

    name: str
    clock: float
    max_clock: float
    memory: float
    used: float


def gpus() -> list[HostGpu]:
    """Empty without nvidia-smi, or when it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return [_gpu(line) for line in text.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _gpu(line: str) -> HostGpu:
    name, *numbers = (part.strip() for part in line.split(","))
    return HostGpu(name, *(float(number) for number in numbers))


def device_name(target: str) -> str:
    """What runs the engine: the GPU's own name, or for `openvino` the CPU's."""
    found = [] if target == "openvino" else gpus()
    return found[0].name if found else str(machine()["cpu"])
