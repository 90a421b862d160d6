"""A Slurm batch script: srun starts the ranks, one per GPU.

Source: tensorrtllm_backend README ("Launch Triton server within Slurm based clusters") and docs/llmapi.md; NVIDIA/
TensorRT-LLM `triton_backend/scripts/triton_task.sh`.
"""

from __future__ import annotations

import shlex

from llmops.model_repository.multi_gpu.multi_node import MultiNodePlan, join_shell_command, render


def slurm_script(cluster: MultiNodePlan) -> str:
    """The text for sbatch."""
    registry, slash, path = cluster.image.partition("/")
    # enroot, which pyxis uses, takes a registry before '#'
    image = f"{registry}#{path}" if slash and "." in registry else cluster.image
    return render(
        "slurm.sh.j2",
        name=cluster.name,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        listens=", ".join(f"{name} $(hostname):{port}" for name, port in cluster.open_ports.items()),
        image=shlex.quote(image),
        mounts=shlex.quote(",".join(f"{folder}:{folder}" for folder in cluster.folders)),
        leader=_quoted(cluster.leader, inside=bool(cluster.follower)),
        follower=_quoted(cluster.follower, inside=True),
    )


def _quoted(words: list[str], inside: bool) -> str:
    """`inside`: within a single-quoted text, where a quote ends it."""
    text = join_shell_command(words)
    return text.replace("'", "'\\''") if inside else text
