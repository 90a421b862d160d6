"""Detect facts about this machine: versions of installed distributions, GPUs and available memory.

No function imports the library that it reports on.
"""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from itertools import takewhile
from pathlib import Path

#: Environment variable with the Python interpreter that has TensorRT-LLM, if this is not the
#: interpreter of llmops (Dockerfile.trtllm).
TRTLLM_PYTHON = "LLMOPS_TRTLLM_PYTHON"
_GPU_LINE = re.compile(r"^GPU \d", re.MULTILINE)


def installed_version(name: str) -> str:
    """Return the version of the distribution `name`, or an empty text if it is not installed."""
    python = os.environ.get(TRTLLM_PYTHON)
    if name == "tensorrt_llm" and python:
        return version_in(python, name)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def version_in(python: str, name: str) -> str:
    """Return the version of a distribution in another interpreter.

    The text is empty if the distribution is not installed there.
    """
    code = f"from importlib.metadata import version; print(version({name!r}))"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def visible_gpus() -> Sequence[str] | None:
    """Return the GPUs that this process may use, or None if nvidia-smi is missing or fails.

    CUDA takes the GPUs of CUDA_VISIBLE_DEVICES up to the first that does not exist.
    """
    chosen, program = os.environ.get("CUDA_VISIBLE_DEVICES"), shutil.which("nvidia-smi")
    listing = None
    if program is not None:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
        listing = None if done.returncode else done.stdout
    present = None if listing is None else [str(number) for number in range(len(_GPU_LINE.findall(listing)))]
    if chosen is None:
        return present

    def exists(gpu: str) -> bool:
        if gpu.startswith("GPU-"):
            # CUDA also accepts the beginning of a GPU's UUID.
            return listing is None or f"(UUID: {gpu}" in listing
        return gpu.startswith("MIG-") or (gpu.isdecimal() and (present is None or int(gpu) < len(present)))

    return list(takewhile(exists, map(str.strip, chosen.split(","))))


def available_memory() -> int | None:
    """Return the bytes available without swapping, or None if /proc does not say.

    The memory limit of this container counts too.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    return min(free, _cgroup_free())


def _cgroup_free() -> int:
    """Return the bytes left within the container's memory limit, or 2**62 without a limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return int(limit) - used if limit != "max" else 2**62
    except (OSError, ValueError):
        return 2**62
