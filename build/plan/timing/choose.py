"""Which source of times a GPU gets."""

from __future__ import annotations

import importlib.util

from llmops.build.plan.gpus import Gpu
from llmops.build.plan.timing.base import OpTimes
from llmops.build.plan.timing.roofline import Roofline
from llmops.build.plan.timing.silicon import Silicon, package_root, table_folder
from llmops.distribution import missing_extra
from llmops.errors import InputError

CHOICES = ("auto", "silicon", "roofline")


def op_times(gpu: Gpu, choice: str = "auto") -> OpTimes:
    """`auto`: silicon where AIConfigurator (and pyarrow) is installed and knows the GPU, else the roofline. Raises
    InputError and MissingDependencyError when silicon was asked for and cannot be had."""
    if choice not in CHOICES:
        raise InputError(f"unknown --timing {choice!r}: take one of {', '.join(CHOICES)}.")
    readable = choice == "silicon" or importlib.util.find_spec("pyarrow") is not None
    folder = table_folder(gpu) if choice != "roofline" and readable else None
    if folder is not None:
        return Silicon(gpu, folder)
    if choice == "silicon":
        if package_root() is None:
            raise missing_extra("--timing silicon needs AIConfigurator's tables, which are not installed", "silicon")
        raise InputError(
            f"--timing silicon: AIConfigurator has no TensorRT-LLM tables for {gpu.name}; take --timing roofline."
        )
    return Roofline(gpu)
