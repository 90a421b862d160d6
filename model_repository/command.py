"""The tritonserver command line."""

from __future__ import annotations

from dataclasses import dataclass

# a large engine takes minutes to load
_STUB_TIMEOUT = 1800


@dataclass(frozen=True)
class Ports:
    """0 means: any free port."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass(frozen=True)
class ServerOptions:
    """What every rank of a server is started with. `exit_timeout` in seconds; `shm_prefix` names its shared memory;
    `backends` is empty for the binary's own backend folder."""

    binary: str
    repository: str
    backends: str = ""
    host: str = "127.0.0.1"
    ports: Ports = Ports()
    shm_prefix: str = "llmops_"
    exit_timeout: int = 30
    verbose: int = 0


def server_command(options: ServerOptions) -> list[str]:
    """One tritonserver that loads everything in the repository."""
    return [
        *_common(options),
        f"--http-address={options.host}",
        f"--http-port={options.ports.http}",
        f"--grpc-address={options.host}",
        f"--grpc-port={options.ports.grpc}",
        f"--metrics-address={options.host}",
        f"--metrics-port={options.ports.metrics}",
    ]


def follower_command(options: ServerOptions, models: list[str]) -> list[str]:
    """A tritonserver of another MPI rank: it loads the engine models only, and nobody can talk to it."""
    return [
        *_common(options),
        "--allow-http=false",
        "--allow-grpc=false",
        "--allow-metrics=false",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
    ]


def _common(options: ServerOptions) -> list[str]:
    backends = [f"--backend-directory={options.backends}"] if options.backends else []
    return [
        options.binary,
        f"--model-repository={options.repository}",
        *backends,
        # NVIDIA's launcher does the same: what config.pbtxt says is what is served
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={options.exit_timeout}",
        f"--log-verbose={options.verbose}",
        f"--backend-config=python,shm-region-prefix-name={options.shm_prefix}",
        f"--backend-config=python,stub-timeout-seconds={_STUB_TIMEOUT}",
    ]
