"""How a repository is started on more than one GPU: MPI on one machine, Kubernetes and Slurm on several.

The tritonserver of a single process belongs to `server/`.
"""

from llmops.model_repository.multi_gpu.base import LAUNCHES, Launch, LaunchPlan, plan_launch
from llmops.model_repository.multi_gpu.mpi import with_mpi

__all__ = ["LAUNCHES", "Launch", "LaunchPlan", "plan_launch", "with_mpi"]
