"""Which way a repository is started, from what is in it.

Source: triton-inference-server/tensorrtllm_backend README ("Leader Mode", "Orchestrator Mode") and NVIDIA/TensorRT-LLM
`triton_backend/scripts/launch_triton_server.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmops.contract import ENGINE_SUFFIX
from llmops.errors import InputError
from llmops.model_repository.repository.manifest import RepositoryManifest

LaunchMode = Literal["single", "leader", "orchestrator"]
LAUNCH_MODES: tuple[str, ...] = ("auto", "single", "leader", "orchestrator")


@dataclass(frozen=True)
class LaunchPlan:
    """`single`: one tritonserver, libraries start their own workers. `leader`: one tritonserver per GPU under mpirun,
    rank 0 answers. `orchestrator`: one tritonserver whose backend spawns a worker per GPU.

    `engines`: the engine models of NVIDIA's C++ backend. `gpus`: the GPUs that one machine needs.
    """

    launch: LaunchMode
    world_size: int
    engines: list[str]
    gpus: int


def plan_launch(marker: RepositoryManifest, asked: str = "auto") -> LaunchPlan:
    """Raises InputError for a launch that this repository cannot have."""
    mpi = {name: engine for name, engine in marker.engines.items() if engine.is_mpi}
    largest = max((engine.world_size for engine in mpi.values()), default=1)
    chosen: LaunchMode = asked if asked != "auto" else _default_mode(len(mpi), largest)  # type: ignore[assignment]
    _check(chosen, asked, mpi=len(mpi), largest=largest)
    total = sum(engine.world_size for engine in marker.engines.values() if engine.tensorrt_llm)
    gpus = max(total if len(mpi) < 2 else 0, _highest_gpu(marker) + 1, largest)
    return LaunchPlan(chosen, largest if chosen == "leader" else 1, [name + ENGINE_SUFFIX for name in mpi], gpus)


def _default_mode(mpi: int, largest: int) -> LaunchMode:
    if largest == 1:
        return "single"
    return "leader" if mpi == 1 else "orchestrator"


def _check(chosen: LaunchMode, asked: str, mpi: int, largest: int) -> None:
    if chosen == "single" and largest > 1:
        raise InputError(
            f"--launch single cannot run an engine of {largest} GPUs: use leader, or orchestrator for several engines."
        )
    if chosen == "leader" and mpi > 1:
        raise InputError(
            f"--launch leader runs one engine, this repository has {mpi} of NVIDIA's C++ backend: use --launch "
            "orchestrator, or one repository per engine."
        )
    if chosen != "single" and mpi == 0:
        raise InputError(
            f"--launch {asked} is for TensorRT engines on NVIDIA's C++ backend, of which this repository has none; "
            "its engines start their own workers: leave --launch out."
        )


def _highest_gpu(marker: RepositoryManifest) -> int:
    ids = [engine.gpu_device_ids.replace(";", ",") for engine in marker.engines.values()]
    return max((int(one) for text in ids for one in text.split(",") if one.strip().isdigit()), default=-1)
