"""`llmops serve --dry-run`: the exact command, without starting anything."""

from __future__ import annotations

import shlex
from pathlib import Path

from llmops.build.trtllm.container_images import TrtllmImage
from llmops.model_repository.multi_gpu import LaunchPlan, launch_command, plan_launch
from llmops.model_repository.repository.compatibility import required_image, serving_image
from llmops.model_repository.repository.manifest import RepositoryManifest, ServedEngine
from llmops.model_repository.repository.validation import check_repository
from llmops.model_repository.server.command import Ports, ServerOptions
from llmops.model_repository.server.installation import CONTAINER_ROOT, container_installation, find_installation

_MEANING = {
    "single": "one tritonserver",
    "leader": "one tritonserver per GPU under mpirun; rank 0 answers, the others wait for its work",
    "orchestrator": "one tritonserver, whose backend starts a worker for each GPU",
}


def describe_launch(
    repository: Path,
    host: str,
    ports: Ports,
    exit_timeout: int = 30,
    verbose: int = 0,
    launch: str = "auto",
    http: bool = False,
    metrics: bool = True,
    traces: str = "",
) -> str:
    """What `llmops serve` would run, as text that a shell takes. Raises InputError where it would."""
    check_repository(repository)
    marker = RepositoryManifest.load(repository)
    plan, image = plan_launch(marker, launch), required_image(marker)
    inside = (CONTAINER_ROOT / "bin" / "tritonserver").is_file()
    if image is not None and serving_image(image, marker) == image.own and not inside:
        serve = ["serve", str(repository.resolve()), *_serve_options(host, ports, exit_timeout, http, metrics, traces)]
        return _in_own_image(image, marker, plan, repository.resolve(), serve)
    installation = container_installation() if image else find_installation()
    options = ServerOptions(
        binary=str(installation.binary),
        repository=str(repository.resolve()),
        backends=str(installation.backends),
        host=host,
        ports=ports,
        http_host=installation.http_host(host) if http else "",
        metrics=metrics,
        traces=traces,
        exit_timeout=exit_timeout,
        verbose=verbose,
    )
    command, environment = launch_command(options, plan)
    if not image:
        environment = {**installation.environment, **environment}
    lines = [*(_engine(name, engine) for name, engine in marker.engines.items()), f"# {_MEANING[plan.launch]}"]
    if image is not None:
        lines += [f"# {line}" for line in _where(image, marker, plan, repository.resolve(), host)]
    return "\n".join([*lines, "", format_shell_command(command, environment)])


def _serve_options(host: str, ports: Ports, exit_timeout: int, http: bool, metrics: bool, traces: str) -> list[str]:
    return [
        *("--host", host, "--grpc-port", str(ports.grpc), "--exit-timeout", f"{exit_timeout}s"),
        *(("--http", "--http-port", str(ports.http)) if http else ()),
        *(("--metrics-port", str(ports.metrics)) if metrics else ("--no-metrics",)),
        *(("--traces", traces) if traces else ()),
    ]


def _in_own_image(
    image: TrtllmImage, marker: RepositoryManifest, plan: LaunchPlan, repository: Path, serve: list[str]
) -> str:
    """`llmops serve` inside the image: it starts the wheel's tritonserver as it does everywhere else."""
    lines = [
        *(_engine(name, engine) for name, engine in marker.engines.items()),
        f"# {_MEANING[plan.launch]}, inside {image.own} with {plan.gpus} GPU{'s' if plan.gpus != 1 else ''}",
        f"# made with {image.recipe(image.own)}",
        "",
        shlex.join([*docker_run_command(image.own, marker, repository, {}), *serve]),
    ]
    return "\n".join(lines)


def format_shell_command(command: list[str], environment: dict[str, str]) -> str:
    """The first program with one flag per line, each further rank of mpirun on a line of its own."""
    end = command.index(":") if ":" in command else len(command)
    server = next(i for i, word in enumerate(command) if word.startswith("--model-repository"))
    lines = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += [shlex.join(command[:server]), *(shlex.quote(word) for word in command[server:end])]
    for word in command[end:]:
        if word == ":":
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(lines)


def docker_run_command(
    reference: str, marker: RepositoryManifest, repository: Path, environment: dict[str, str]
) -> list[str]:
    """`docker run … IMAGE`, to put before the command; all is mounted at its own path, as config.pbtxt names it."""
    folders = sorted({str(repository), *(engine.directory for engine in marker.engines.values())})
    mounts = [word for folder in folders for word in ("--mount", f"type=bind,source={folder},target={folder},readonly")]
    variables = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    limits = ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]
    return [
        *("docker", "run", "--rm", "--gpus", "all", "--ipc", "host", "--network", "host"),
        *limits,
        *mounts,
        *variables,
        reference,
    ]


def _engine(name: str, engine: ServedEngine) -> str:
    runs_on = f"TensorRT-LLM {engine.tensorrt_llm}, {engine.backend} backend" if engine.tensorrt_llm else engine.backend
    gpus = f", tp {engine.tp_size}, pp {engine.pp_size}" if engine.tensorrt_llm else ""
    return f"# {name}: {engine.target}, {runs_on}{gpus}, {engine.directory}"


def _where(image: TrtllmImage, marker: RepositoryManifest, plan: LaunchPlan, repository: Path, host: str) -> list[str]:
    options = ServerOptions("", "")
    environment = launch_command(options, plan)[1]
    lines = [f"inside {image.reference} with {plan.gpus} GPU{'s' if plan.gpus != 1 else ''}; on a docker host, put"]
    lines.append("  " + shlex.join(docker_run_command(image.reference, marker, repository, environment)))
    lines.append(
        "before it" + (" (and --host 0.0.0.0 to be reached from other machines)" if host == "127.0.0.1" else "")
    )
    if (CONTAINER_ROOT / "bin" / "tritonserver").is_file():
        return []
    return lines
