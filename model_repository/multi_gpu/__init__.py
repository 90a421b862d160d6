"""Launches on more than one GPU: MPI on one machine, Kubernetes and Slurm on several."""

from pathlib import Path

from llmops.model_repository.server.command import LaunchOptions


def export_launch(
    kind: str, repository: Path, options: LaunchOptions, gpus_per_node: int, image: str | None, claim: str
) -> str:
    """Return the file with which a cluster starts a repository.

    The file is for `kubectl apply -f -` (kind lws) or sbatch (kind slurm).

    Args:
        kind: `lws` or `slurm`.
        repository: The model repository.
        options: The options of the server.
        gpus_per_node: The number of GPUs of each machine.
        image: The container image, or None for the one that serves the repository.
        claim: The name of the volume claim with the engines. Only used with `lws`.

    Raises:
        InputError: The repository cannot be launched with these options.
    """
    from llmops.model_repository.multi_gpu.lws import lws_manifests
    from llmops.model_repository.multi_gpu.multi_node import plan_multi_node
    from llmops.model_repository.multi_gpu.slurm import slurm_script

    # use our image, because mpirun reaches the other pods through kubectl, which NVIDIA's image
    # lacks
    plan = plan_multi_node(repository, options, gpus_per_node=gpus_per_node, image=image, own_image=kind == "lws")
    return slurm_script(plan) if kind == "slurm" else lws_manifests(plan, claim)
