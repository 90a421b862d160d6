"""The output of `llmops serve --dry-run`: the exact command, without starting a process."""

import shlex
from pathlib import Path

from llmops.build.trtllm.container_images import bind_mount
from llmops.model_repository.multi_gpu.launch_plan import launch_command, plan_launch
from llmops.model_repository.repository.compatibility import check_engines, required_image, serving_image
from llmops.model_repository.repository.manifest import RepositoryManifest, ServedEngine
from llmops.model_repository.repository.validation import check_repository, check_unedited
from llmops.model_repository.server.command import LaunchOptions
from llmops.model_repository.server.installation import CONTAINER_ROOT, container_installation, find_installation

_MEANING = {
    "single": "one tritonserver",
    "leader": "one tritonserver per GPU under mpirun; rank 0 answers, the other ranks wait for work",
    "orchestrator": "one tritonserver, whose backend starts a worker for each GPU",
}


def describe_launch(repository: Path, options: LaunchOptions, strict: bool = False) -> str:
    """Return the command of `llmops serve` as text for a shell.

    Raises InputError where `llmops serve` raises it for the repository.
    """
    check_repository(repository)
    manifest, repository = RepositoryManifest.load(repository), repository.resolve()
    if strict:
        check_unedited(repository, manifest, strict)
        check_engines(manifest)
    plan, image = plan_launch(manifest, options.launch), required_image(manifest)
    lines = [_describe_engine(name, engine) for name, engine in manifest.engines.items()]
    meaning, gpus = f"# {_MEANING[plan.mode]}", f"{plan.gpus} GPU{'s' if plan.gpus != 1 else ''}"
    inside = (CONTAINER_ROOT / "bin" / "tritonserver").is_file()
    if image is not None and serving_image(image, manifest) == image.own and not inside:
        # `llmops serve` inside the image starts the wheel's tritonserver
        docker = docker_run_command(image.own, manifest, repository, {})
        lines += [f"{meaning}, inside {image.own} with {gpus}", f"# made with {image.recipe(image.own)}"]
        return "\n".join([*lines, "", shlex.join([*docker, "serve", str(repository), *_serve_options(options)])])
    installation = container_installation() if image else find_installation()
    command, environment = launch_command(installation.server_options(repository, options), plan)
    lines.append(meaning)
    if image is None:
        environment = {**installation.environment, **environment}
    elif not inside:
        docker = docker_run_command(image.reference, manifest, repository, environment)
        reached = " (and --host 0.0.0.0 to be reached from other machines)" if options.host == "127.0.0.1" else ""
        lines.append(f"# inside {image.reference} with {gpus}; on a docker host, put")
        lines += [f"#   {shlex.join(docker)}", f"# before it{reached}"]
    return "\n".join([*lines, "", format_shell_command(command, environment)])


def _serve_options(options: LaunchOptions) -> list[str]:
    ports = options.ports
    return [
        *("--host", options.host, "--grpc-port", str(ports.grpc), "--exit-timeout", f"{options.exit_timeout}s"),
        *(("--http", "--http-port", str(ports.http)) if options.http else ()),
        *(("--metrics-port", str(ports.metrics)) if options.metrics else ("--no-metrics",)),
        *(("--traces", options.traces) if options.traces else ()),
    ]


def format_shell_command(command: list[str], environment: dict[str, str]) -> str:
    """Return a shell command with one flag per line.

    Each further rank of mpirun is on a line of its own.
    """
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
    reference: str, manifest: RepositoryManifest, repository: Path, environment: dict[str, str]
) -> list[str]:
    """Return `docker run … IMAGE`, to put before a command.

    Folders are mounted at the same paths, which the config.pbtxt files contain.
    """
    folders = sorted({str(repository), *(engine.directory for engine in manifest.engines.values())})
    mounts = [word for folder in folders for word in ("--mount", bind_mount(folder, folder, "readonly"))]
    variables = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    return [
        *("docker", "run", "--rm", "--gpus", "all", "--ipc", "host", "--network", "host"),
        *("--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
        *mounts,
        *variables,
        reference,
    ]


def _describe_engine(name: str, engine: ServedEngine) -> str:
    runs_on = f"TensorRT-LLM {engine.tensorrt_llm}, {engine.backend} backend" if engine.tensorrt_llm else engine.backend
    gpus = f", tp {engine.tp_size}, pp {engine.pp_size}" if engine.tensorrt_llm else ""
    return f"# {name}: {engine.target}, {runs_on}{gpus}, {engine.directory}"
