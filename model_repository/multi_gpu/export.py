"""`llmops serve --export`: the file with which a cluster's own tools start a repository."""

from __future__ import annotations

from pathlib import Path

from llmops.model_repository.multi_gpu.lws import lws_manifests
from llmops.model_repository.multi_gpu.multi_node import plan_multi_node
from llmops.model_repository.multi_gpu.slurm import slurm_script
from llmops.model_repository.server.command import Ports


def export_launch(
    kind: str,
    repository: Path,
    gpus_per_node: int,
    image: str | None,
    claim: str,
    ports: Ports,
    exit_timeout: int,
    http: bool = False,
    metrics: bool = True,
    traces: str = "",
) -> str:
    """The text for `kubectl apply -f -` (lws) or sbatch (slurm). Raises InputError."""
    # mpirun reaches the other pods through kubectl, which NVIDIA's image does not have and ours does
    own_image = kind == "lws"
    cluster = plan_multi_node(repository, gpus_per_node, image, ports, exit_timeout, http, metrics, traces, own_image)
    return slurm_script(cluster) if kind == "slurm" else lws_manifests(cluster, claim)
