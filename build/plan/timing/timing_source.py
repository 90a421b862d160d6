"""Which source of times a GPU gets."""

from __future__ import annotations

from llmops.build.installed_versions import installed_version
from llmops.build.plan.gpu_specs import GpuSpec
from llmops.build.plan.timing.operation_times import OperationTimes
from llmops.build.plan.timing.roofline import RooflineTimes
from llmops.build.plan.timing.silicon import SiliconTimes, package_root, pyarrow_problem, table_folder
from llmops.distribution import missing_extra
from llmops.errors import InputError

CHOICES = ("auto", "silicon", "roofline")


def timing_source(gpu: GpuSpec, choice: str = "auto") -> OperationTimes:
    """Return the source of times for a GPU.

    Args:
        gpu: The GPU.
        choice: `silicon` asks for AIConfigurator's measured tables, `roofline` for none; `auto` takes the tables where
            they can be read, and names the cause in the label of the roofline where installed ones cannot.

    Raises:
        InputError: The choice is unknown, or silicon was asked for and AIConfigurator has no tables for the GPU.
        MissingDependencyError: Silicon was asked for, and a library is missing or cannot be imported.
    """
    if choice not in CHOICES:
        raise InputError(f"--timing {choice!r} is unknown; choose one of {', '.join(CHOICES)}.")
    if choice == "roofline" or (choice == "auto" and (package_root() is None or gpu.silicon is None)):
        return RooflineTimes(gpu)
    if package_root() is None:
        raise missing_extra("--timing silicon needs AIConfigurator's tables, which are not installed", "silicon")
    folder, unreadable = table_folder(gpu), pyarrow_problem()
    if folder is not None and not unreadable:
        return SiliconTimes(gpu, folder)
    cause = unreadable or f"AIConfigurator {installed_version('aiconfigurator')} has no TensorRT-LLM tables for it"
    if choice == "silicon":
        if unreadable:
            raise missing_extra(f"--timing silicon cannot read the tables: {unreadable}", "silicon")
        raise InputError(f"--timing silicon cannot plan for {gpu.name}: {cause}; take --timing roofline.")
    roofline = RooflineTimes(gpu)
    roofline.label += f", as {cause}"
    return roofline
