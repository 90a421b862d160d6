"""What a launch on several machines is made of, whatever the scheduler."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import jinja2

from llmops.build.trtllm.container_images import TrtllmImage
from llmops.errors import InputError
from llmops.model_repository.multi_gpu.launch_plan import plan_launch
from llmops.model_repository.repository.compatibility import required_image, serving_image
from llmops.model_repository.repository.manifest import RepositoryManifest
from llmops.model_repository.repository.validation import check_repository
from llmops.model_repository.server.command import Ports, ServerOptions, follower_command, server_command
from llmops.model_repository.server.installation import container_installation

LLMAPI_LAUNCH = "trtllm-llmapi-launch"
# the scripts make a new one at each start, because what is printed here may end up in a git repository
SECRET_VARIABLE = "LLMOPS_SECRET"


@dataclass(frozen=True)
class MultiNodePlan:
    """One engine over `nodes` machines of `gpus_per_node` GPUs. `leader` is what rank 0 runs and `follower` the other
    ranks; where the LLM API does the work `follower` is empty: its launcher starts `leader` on rank 0 only.
    `folders` must lie at the same path on every machine."""

    name: str
    image: str
    nodes: int
    gpus_per_node: int
    leader: list[str]
    follower: list[str]
    folders: list[Path]
    ports: Ports
    exit_timeout: int
    http: bool = False
    metrics: bool = True

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def open_ports(self) -> dict[str, int]:
        """The ports that the leader listens on, by name."""
        on = {"grpc": True, "metrics": self.metrics, "http": self.http}
        return {name: getattr(self.ports, name) for name, is_on in on.items() if is_on}

    @property
    def root(self) -> Path:
        """The folder that holds all of them, to be mounted as one volume."""
        common = Path(os.path.commonpath(self.folders))
        return common.parent if common in self.folders and len(self.folders) == 1 else common


def plan_multi_node(
    repository: Path,
    gpus_per_node: int,
    image: str | None,
    ports: Ports,
    exit_timeout: int,
    http: bool = False,
    metrics: bool = True,
    traces: str = "",
    own_image: bool = False,
) -> MultiNodePlan:
    """Return what to start where; `own_image`: `image` is a pushed copy of the image of our Dockerfile.

    Raises:
        InputError: This repository, or this number of GPUs, cannot be launched this way.
    """
    check_repository(repository)
    marker = RepositoryManifest.load(repository)
    needed = required_image(marker)
    if len(marker.engines) != 1 or needed is None:
        raise InputError(
            f"{repository} holds {', '.join(f'{name} ({one.target})' for name, one in marker.engines.items())}; an "
            "export needs exactly one engine, of target tensorrt or pytorch. Make a repository with that engine alone."
        )
    if not needed.layout.server:
        raise InputError(
            f"{repository} is served in the image {needed.tag}, whose tritonserver lies in a Python package that "
            "exports do not start: start it there with `llmops serve`, on one machine, or build for --set image=26.07."
        )
    ((name, engine),) = marker.engines.items()
    nodes, rest = divmod(engine.world_size, gpus_per_node)
    if engine.world_size < gpus_per_node:
        nodes, gpus_per_node = 1, engine.world_size
    elif rest:
        raise InputError(
            f"--gpus-per-node {gpus_per_node} does not divide the {engine.world_size} GPUs of {name}: every machine "
            "takes the same number of ranks."
        )
    options = _options(repository, ports, exit_timeout, http, metrics, traces)
    leader = server_command(options)
    if engine.is_mpi:
        follower = follower_command(options, plan_launch(marker, "auto").engines)
    elif engine.runtime == "tensorrt":
        raise InputError(
            f"{name} was put into {repository} with --serving llmops, which runs all ranks of an engine on one machine "
            "and is not exported: start it there with `llmops serve`, or make the repository with --serving nvidia."
        )
    else:
        leader, follower = [LLMAPI_LAUNCH, *leader], []
        _refuse_spaces(leader)
    folders = sorted({repository.resolve(), Path(engine.directory)})
    return MultiNodePlan(
        name,
        _pushed(image, needed) if own_image else image or serving_image(needed, marker),
        nodes,
        gpus_per_node,
        leader,
        follower,
        folders,
        ports,
        exit_timeout,
        http,
        metrics,
    )


def _pushed(image: str | None, needed: TrtllmImage) -> str:
    """Return the image. Raises InputError for a name without a registry, which only one machine knows."""
    registry, slash, _ = (image or needed.own).partition("/")
    if not slash or not ("." in registry or ":" in registry):
        raise InputError(
            f"The nodes of a cluster cannot pull {image or needed.own}: push the image of Dockerfile.trtllm to a "
            "registry that they reach, and give --image REGISTRY/NAME:TAG."
        )
    return image or ""


def join_shell_command(words: list[str]) -> str:
    """With SECRET_VARIABLE in place of the secret, for a script that sets it."""
    return shlex.join(words).replace(SECRET_VARIABLE, f"${SECRET_VARIABLE}")


def render(template: str, **values: object) -> str:
    """A shell script of this folder; a value that is missing is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(template).render(values)


def _options(
    repository: Path, ports: Ports, exit_timeout: int, http: bool, metrics: bool, traces: str
) -> ServerOptions:
    installation = container_installation()
    return ServerOptions(
        binary=str(installation.binary),
        repository=str(repository.resolve()),
        backends=str(installation.backends),
        host="0.0.0.0",
        ports=ports,
        http_host="0.0.0.0" if http else "",
        metrics=metrics,
        traces=traces,
        secret=SECRET_VARIABLE,
        exit_timeout=exit_timeout,
    )


def _refuse_spaces(words: list[str]) -> None:
    """trtllm-llmapi-launch splits its command at every space, quoted or not."""
    bad = [word for word in words if any(char.isspace() for char in word)]
    if bad:
        raise InputError(f"{bad[0]}: {LLMAPI_LAUNCH} cannot take a path with a space; move the repository.")
