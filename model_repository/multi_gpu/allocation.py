"""A server that runs inside a Slurm allocation although it is for one machine.

Open MPI starts the workers of the LLM API through the scheduler when it finds one in the
environment, and fails with MPI_ERR_SPAWN (ai-dynamo/dynamo #808, #992; NVIDIA's Qwen2.5-VL guide
for Triton). TensorRT-LLM's own launcher takes these variables away for as long as its command runs
(tensorrt_llm/llmapi/trtllm-llmapi-launch, lines 49-75).
"""

from __future__ import annotations

from collections.abc import Mapping

_PREFIXES = ("SLURM_", "PMI_", "PMIX_")
#: Set by trtllm-llmapi-launch: the workers are there already, and nothing is started through MPI.
_LAUNCHED = "TLLM_SPAWN_PROXY_PROCESS"


def is_inside_slurm_job(environment: Mapping[str, str]) -> bool:
    """Return True if a process with this environment runs inside a Slurm job."""
    return bool(environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID"))


def without_slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what points MPI to the scheduler, unless its own launcher
    started the workers.
    """
    if environment.get(_LAUNCHED) or not is_inside_slurm_job(environment):
        return dict(environment)
    return {name: value for name, value in environment.items() if not name.startswith(_PREFIXES)}
