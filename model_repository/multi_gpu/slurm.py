"""The Slurm batch script of a launch: srun starts the ranks, one per GPU.

Source: tensorrtllm_backend README ("Launch Triton server within Slurm based clusters") and
docs/llmapi.md; NVIDIA/ TensorRT-LLM `triton_backend/scripts/triton_task.sh`.
"""

import shlex

from llmops.errors import InputError
from llmops.model_repository.multi_gpu.multi_node import (
    MultiNodePlan,
    join_shell_command,
    render_script,
    server_assignment,
)


def slurm_script(plan: MultiNodePlan) -> str:
    """Return the script for sbatch.

    Raises:
        InputError: The name of a folder has a character that Slurm's list of mounts cannot hold.
    """
    registry, slash, path = plan.image.partition("/")
    # enroot, which pyxis uses, expects '#' after a registry. The path of an image file may begin
    # with a dot.
    image = f"{registry}#{path}" if slash and set(registry.strip(".")) & set(".:") else plan.image
    for folder in plan.folders:
        if set(str(folder)) & set(",:"):
            raise InputError(f"Slurm cannot mount {folder}, whose name has a comma or a colon; move the folder.")
    return render_script(
        "slurm.sh.j2",
        name=plan.name,
        nodes=plan.nodes,
        gpus_per_node=plan.gpus_per_node,
        listens=", ".join(f"{name} $(hostname):{port}" for name, port in plan.open_ports.items()),
        image=shlex.quote(image),
        mounts=shlex.quote(",".join(f"{folder}:{folder}:ro" for folder in plan.folders)),
        leader=_quoted(plan.leader, inside=bool(plan.follower)),
        follower=_quoted(plan.follower, inside=True),
        server=server_assignment(plan.server),
    )


def _quoted(words: list[str], inside: bool) -> str:
    """Return a shell command. If `inside` is True, escape quotes for a single-quoted text."""
    text = join_shell_command(words)
    return text.replace("'", "'\\''") if inside else text
