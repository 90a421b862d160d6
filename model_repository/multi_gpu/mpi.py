"""The mpirun command lines, as NVIDIA's launch_triton_server.py builds them."""

from __future__ import annotations

from dataclasses import replace

from llmops.model_repository.multi_gpu.launch_plan import LaunchPlan
from llmops.model_repository.server.command import ServerOptions, follower_command, server_command

MPIRUN = "mpirun"
# Set for the orchestrator; with SPAWN_PROCESSES the backend starts its workers itself (MPI_Comm_spawn).
ORCHESTRATOR_ENVIRONMENT = {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}


def launch_command(options: ServerOptions, plan: LaunchPlan) -> tuple[list[str], dict[str, str]]:
    """(command, environment on top of the caller's) for a plan on one machine."""
    if plan.launch == "single":
        return server_command(options), {}
    if plan.launch == "orchestrator":
        command = [*server_command(options), *_no_pools(plan.gpus)]
        return [MPIRUN, "--allow-run-as-root", "-n", "1", *command], dict(ORCHESTRATOR_ENVIRONMENT)
    return [MPIRUN, "--allow-run-as-root", *rank_commands(options, plan)], {}


def rank_commands(options: ServerOptions, plan: LaunchPlan) -> list[str]:
    """What follows mpirun's own flags in leader mode: one program per rank, separated by colons."""
    words = ["-n", "1", *server_command(replace(options, shm_prefix=f"{options.shm_prefix}0_"))]
    for rank in range(1, plan.world_size):
        # a prefix per rank: two servers on one machine would share one segment otherwise
        own = replace(options, shm_prefix=f"{options.shm_prefix}{rank}_")
        words += [":", "-n", "1", *follower_command(own, plan.engines)]
    return words


def _no_pools(gpus: int) -> list[str]:
    """Pools of the orchestrator would take memory from its workers' GPUs (for Triton later than 24.06)."""
    pools = [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(gpus)]
    return ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false", *pools]
