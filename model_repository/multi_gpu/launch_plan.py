"""The plan of a launch on one machine: its mode, and the mpirun commands of several GPUs.

Sources: triton-inference-server/tensorrtllm_backend README ("Leader Mode", "Orchestrator Mode") and
NVIDIA/TensorRT-LLM `triton_backend/scripts/launch_triton_server.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from llmops.contract import ENGINE_SUFFIX
from llmops.errors import InputError
from llmops.model_repository.repository.manifest import RepositoryManifest
from llmops.model_repository.server.command import ServerOptions, follower_command, server_command

LaunchMode = Literal["single", "leader", "orchestrator"]
#: Environment variables of the orchestrator mode. With SPAWN_PROCESSES the backend starts its
#: workers through MPI_Comm_spawn.
_ORCHESTRATOR_VARIABLES = {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}
#: Variables that let Open MPI 4 and 5 start more processes than there are cores. Without them Open
#: MPI starts no process, and the LLM API waits forever. A pod may have fewer cores than GPUs.
OVERSUBSCRIBE = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
_SLURM_PREFIXES = ("SLURM_", "PMI_", "PMIX_")
#: Environment variable that trtllm-llmapi-launch sets after it has started the workers.
_LAUNCHED = "TLLM_SPAWN_PROXY_PROCESS"


@dataclass(frozen=True)
class LaunchPlan:
    """The processes of a launch on one machine.

    Attributes:
        mode: `single` is one tritonserver, whose libraries start their own workers. `leader` is one
            tritonserver per GPU under mpirun, of which rank 0 serves. `orchestrator` is one
            tritonserver whose backend starts a worker per GPU.
        world_size: The number of tritonservers.
        engines: The engine models of NVIDIA's C++ backend.
        gpus: The number of GPUs that the machine needs.
    """

    mode: LaunchMode
    world_size: int
    engines: list[str]
    gpus: int


def plan_launch(manifest: RepositoryManifest, requested: str = "auto") -> LaunchPlan:
    """Return the plan for a repository. Raise InputError for a launch that is not possible."""
    mpi = {name: engine for name, engine in manifest.engines.items() if engine.is_mpi}
    largest = max((engine.world_size for engine in mpi.values()), default=1)
    mode: LaunchMode = requested if requested != "auto" else _default_mode(len(mpi), largest)  # type: ignore[assignment]
    _check_mode(mode, engines=len(mpi), largest=largest)
    total = sum(engine.world_size for engine in manifest.engines.values() if engine.tensorrt_llm)
    return LaunchPlan(
        mode=mode,
        world_size=largest if mode == "leader" else 1,
        engines=[name + ENGINE_SUFFIX for name in mpi],
        gpus=max(total if len(mpi) < 2 else 0, _highest_gpu(manifest) + 1, largest),
    )


def _default_mode(engines: int, largest: int) -> LaunchMode:
    if largest == 1:
        return "single"
    return "leader" if engines == 1 else "orchestrator"


def _check_mode(mode: LaunchMode, engines: int, largest: int) -> None:
    if mode == "single" and largest > 1:
        raise InputError(
            f"--launch single cannot run an engine of {largest} GPUs: use leader, or orchestrator for several engines."
        )
    if mode == "leader" and engines > 1:
        raise InputError(
            f"--launch leader runs one engine, but this repository has {engines} of NVIDIA's C++ backend: "
            "use --launch orchestrator, or one repository per engine."
        )
    if mode != "single" and engines == 0:
        raise InputError(
            f"--launch {mode} is for TensorRT engines on NVIDIA's C++ backend, of which this repository has none; "
            "its engines start their own workers: leave --launch out."
        )


def _highest_gpu(manifest: RepositoryManifest) -> int:
    ids = [engine.gpu_device_ids.replace(";", ",") for engine in manifest.engines.values()]
    return max((int(gpu) for text in ids for gpu in text.split(",") if gpu.strip().isdigit()), default=-1)


def launch_command(options: ServerOptions, plan: LaunchPlan) -> tuple[list[str], dict[str, str]]:
    """Return the command of a plan, and the variables to add to the caller's environment."""
    if plan.mode == "single":
        return server_command(options), {}
    # no binding: Open MPI would bind each of one or two processes to one core, with all threads and
    # stubs of the server
    mpirun = ["mpirun", "--allow-run-as-root", "--bind-to", "none"]
    if plan.mode == "orchestrator":
        # the orchestrator's memory pools would take memory from its workers' GPUs (Triton after
        # 24.06)
        pools = [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(plan.gpus)]
        no_pools = ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false", *pools]
        return [*mpirun, "-n", "1", *server_command(options), *no_pools], dict(_ORCHESTRATOR_VARIABLES)
    # a prefix per rank, because two servers on one machine would otherwise share a segment
    ranks = [replace(options, shm_prefix=f"{options.shm_prefix}{rank}_") for rank in range(plan.world_size)]
    command = [*mpirun, "-n", "1", *server_command(ranks[0])]
    for rank in ranks[1:]:
        command += [":", "-n", "1", *follower_command(rank, plan.engines)]
    return command, {}


def is_inside_slurm_job(environment: Mapping[str, str]) -> bool:
    """Return True if a process with this environment runs inside a Slurm job."""
    return bool(environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID"))


def without_slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that make Open MPI use a scheduler.

    Open MPI starts the workers of the LLM API through the scheduler when it finds one in the
    environment, and fails with MPI_ERR_SPAWN (ai-dynamo/dynamo #808, #992; NVIDIA's Qwen2.5-VL
    guide for Triton). TensorRT-LLM's own launcher removes these variables as well
    (tensorrt_llm/llmapi/trtllm-llmapi-launch, lines 49-75); workers that the launcher has started
    keep the variables.
    """
    if environment.get(_LAUNCHED) or not is_inside_slurm_job(environment):
        return dict(environment)
    return {name: value for name, value in environment.items() if not name.startswith(_SLURM_PREFIXES)}
