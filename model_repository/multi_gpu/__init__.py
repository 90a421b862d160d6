"""How a repository is started on more than one GPU: MPI on one machine, Kubernetes and Slurm on several.

The tritonserver of a single process belongs to `server/`.
"""

from llmops.model_repository.multi_gpu.launch_plan import LAUNCH_MODES, LaunchMode, LaunchPlan, plan_launch
from llmops.model_repository.multi_gpu.mpi import launch_command

__all__ = ["LAUNCH_MODES", "LaunchMode", "LaunchPlan", "launch_command", "plan_launch"]
