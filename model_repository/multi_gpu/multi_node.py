"""The plan of a launch on several machines, which is the same for every scheduler."""

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from llmops.build.trtllm.container_images import TrtllmImage
from llmops.errors import InputError
from llmops.model_repository.multi_gpu.launch_plan import plan_launch
from llmops.model_repository.repository.compatibility import required_image, serving_image
from llmops.model_repository.repository.manifest import RepositoryManifest
from llmops.model_repository.repository.pbtxt import template_environment
from llmops.model_repository.repository.validation import check_repository
from llmops.model_repository.server.command import LaunchOptions, follower_command, server_command
from llmops.model_repository.server.installation import container_installation

LLMAPI_LAUNCH = "trtllm-llmapi-launch"
#: Environment variable with the secret of the restricted APIs. The scripts create a new secret at
#: each start, because the printed file may end up in a git repository.
SECRET_VARIABLE = "LLMOPS_SECRET"
#: Environment variable with the command that trtllm-llmapi-launch starts. The launcher logs its
#: arguments, and the secret must not be in a log.
SERVER_VARIABLE = "LLMOPS_SERVER"


@dataclass(frozen=True)
class MultiNodePlan:
    """The launch of one engine on several machines.

    Attributes:
        name: The served name.
        image: The container image.
        nodes: The number of machines.
        gpus_per_node: The number of GPUs of each machine.
        leader: The command of rank 0.
        follower: The command of the other ranks. Empty for the LLM API, whose launcher starts
            its command on rank 0 only.
        server: The command that SERVER_VARIABLE holds. Empty for NVIDIA's C++ backend.
        folders: Folders that must lie at the same path on every machine.
        options: The options of the server.
    """

    name: str
    image: str
    nodes: int
    gpus_per_node: int
    leader: list[str]
    follower: list[str]
    server: list[str]
    folders: list[Path]
    options: LaunchOptions

    @property
    def world_size(self) -> int:
        """The number of ranks, one per GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def open_ports(self) -> dict[str, int]:
        """The ports that the leader listens on, by name."""
        servers = {"grpc": True, "metrics": self.options.metrics, "http": self.options.http}
        return {name: getattr(self.options.ports, name) for name, is_on in servers.items() if is_on}

    @property
    def root(self) -> Path:
        """The common parent of all `folders`, which is mounted as one volume."""
        common = Path(os.path.commonpath(self.folders))
        return common.parent if common in self.folders and len(self.folders) == 1 else common


def plan_multi_node(
    repository: Path, options: LaunchOptions, gpus_per_node: int, image: str | None, own_image: bool = False
) -> MultiNodePlan:
    """Return the plan of a repository with one engine.

    Args:
        repository: The model repository.
        options: The options of the server.
        gpus_per_node: The GPUs of each machine.
        image: The container image, or None for the one that serves the repository.
        own_image: True if `image` must be a pushed copy of the image of our Dockerfile.

    Raises:
        InputError: The repository cannot be launched on several machines, or not with this number
            of GPUs per machine.
    """
    check_repository(repository)
    manifest = RepositoryManifest.load(repository)
    needed = required_image(manifest)
    if len(manifest.engines) != 1 or needed is None:
        raise InputError(
            f"{repository} holds {', '.join(f'{name} ({one.target})' for name, one in manifest.engines.items())}; an "
            "export needs exactly one engine, of target tensorrt or pytorch. Make a repository with that engine alone."
        )
    if not needed.layout.server:
        raise InputError(
            f"{repository} is served in the image {needed.tag}, whose tritonserver lies in a Python package that "
            "exports do not start: start it there with `llmops serve`, on one machine, or build for --set image=26.07."
        )
    ((name, engine),) = manifest.engines.items()
    nodes, rest = divmod(engine.world_size, gpus_per_node)
    if engine.world_size < gpus_per_node:
        nodes, gpus_per_node = 1, engine.world_size
    elif rest:
        raise InputError(
            f"--gpus-per-node {gpus_per_node} does not divide the {engine.world_size} GPUs of {name}: "
            "choose a divisor, because every machine runs the same number of ranks."
        )
    options = replace(options, host="0.0.0.0")
    server = replace(container_installation().server_options(repository, options), secret=SECRET_VARIABLE)
    leader, follower, launched = server_command(server), [], []
    if engine.is_mpi:
        follower = follower_command(server, plan_launch(manifest).engines)
    elif engine.runtime == "tensorrt":
        raise InputError(
            f"{name} was put into {repository} with --serving llmops, which runs all ranks of an engine on one machine "
            "and is not exported: start it there with `llmops serve`, or make the repository with --serving nvidia."
        )
    else:
        _check_spaces(leader)
        # 1.2's launcher waits for ever after a server that failed (`set -e`), so the server's end ends
        # the process group, to which the launcher belongs.
        leader, launched = [LLMAPI_LAUNCH, "bash", "-c", f"${SERVER_VARIABLE};kill${{IFS}}0"], leader
    _check_gpu_ids(name, engine.gpu_device_ids, nodes, gpus_per_node)
    return MultiNodePlan(
        name=name,
        image=_pushed(image, needed) if own_image else image or serving_image(needed, manifest),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        leader=leader,
        follower=follower,
        server=launched,
        folders=sorted({repository.resolve(), Path(engine.directory)}),
        options=options,
    )


def _pushed(image: str | None, needed: TrtllmImage) -> str:
    """Return the image. Raise InputError for a name without a registry, which nodes cannot pull."""
    registry, slash, _ = (image or needed.own).partition("/")
    if not slash or not ("." in registry or ":" in registry):
        raise InputError(
            f"The nodes of a cluster cannot pull {image or needed.own}: push the image of Dockerfile.trtllm to a "
            "registry that they reach, and give --image REGISTRY/NAME:TAG."
        )
    return image or ""


def join_shell_command(words: list[str]) -> str:
    """Return a shell command that reads the secret from SECRET_VARIABLE."""
    return shlex.join(words).replace(SECRET_VARIABLE, f"${SECRET_VARIABLE}")


def server_assignment(words: list[str]) -> str:
    """Return the shell assignment of SERVER_VARIABLE, or an empty text for no words.

    A shell that expands the variable splits the value at spaces and removes no quotes.
    """
    text = shlex.quote(" ".join(words))
    return f"{SERVER_VARIABLE}=" + text.replace(SECRET_VARIABLE, f"'\"${SECRET_VARIABLE}\"'") if words else ""


def render_script(template: str, **values: object) -> str:
    """Render a shell script of this folder. A missing value is an error."""
    return template_environment(Path(__file__).parent).get_template(template).render(values)


def _check_gpu_ids(name: str, ids: str, nodes: int, gpus_per_node: int) -> None:
    """Raise InputError for GPU numbers that an engine does not find on its machines.

    TensorRT-LLM counts the GPUs of each machine from 0, and takes no list for several machines
    (cpp/tensorrt_llm/runtime/worldConfig.cpp).
    """
    numbers = [int(number) for number in ids.replace(";", ",").split(",") if number.strip()]
    if numbers and (nodes > 1 or max(numbers) >= gpus_per_node):
        raise InputError(
            f"{name} was put on GPU {ids} of this machine, but an export has {nodes} with GPUs 0 to "
            f"{gpus_per_node - 1}: make the repository without --gpus, and the engine without serve.gpu_device_ids."
        )


def _check_spaces(words: list[str]) -> None:
    """Raise InputError for a word with a space.

    trtllm-llmapi-launch splits its command at all spaces, and a shell splits SERVER_VARIABLE at all
    spaces.
    """
    bad = [word for word in words if any(char.isspace() for char in word)]
    if bad:
        raise InputError(f"{bad[0]}: {LLMAPI_LAUNCH} cannot take a path with a space; move the repository.")
