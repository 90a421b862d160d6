"""The tritonserver command line."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

# A client could map the backend's own memory, write a file of its choice (trace_file, log_file) or change what is
# loaded. Names: triton-inference-server/server src/restricted_features.h, the same from 2.51 to 2.71.
RESTRICTED = ("shared-memory", "trace", "logging")
# The gateway finds the models through gRPC's repository index; loading and unloading are off (--model-control-mode).
RESTRICTED_HTTP = (*RESTRICTED, "model-repository")
# Triton refuses to map what starts so (kTritonSharedMemoryRegionPrefix in src/common.h, since 25.07)
SHM_PREFIX = "triton_python_backend_shm_region_llmops_"
# a large engine takes minutes to load
_STUB_TIMEOUT = 1800
# ms
_TRACES_EVERY = 1000


@dataclass(frozen=True)
class Ports:
    """0 means: any free port."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass(frozen=True)
class ServerOptions:
    """What every rank of a server is started with. `exit_timeout` in seconds; `shm_prefix` names its shared memory;
    `backends` is empty for the binary's own backend folder; `http_host` is empty for no HTTP server, `traces` for none.
    `secret` would open the restricted APIs: nobody needs them, so it is never disclosed."""

    binary: str
    repository: str
    backends: str = ""
    host: str = "127.0.0.1"
    ports: Ports = Ports()
    http_host: str = ""
    metrics: bool = True
    traces: str = ""
    shm_prefix: str = SHM_PREFIX
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    exit_timeout: int = 30
    verbose: int = 0


def server_command(options: ServerOptions) -> list[str]:
    """One tritonserver that loads everything in the repository."""
    return [
        *_common(options),
        "--model-control-mode=none",
        f"--grpc-address={options.host}",
        f"--grpc-port={options.ports.grpc}",
        f"--grpc-restricted-protocol={_restricted(RESTRICTED, options)}",
        *_http(options),
        *_metrics(options),
        *_traces(options),
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


def _http(options: ServerOptions) -> list[str]:
    if not options.http_host:
        return ["--allow-http=false"]
    return [
        f"--http-address={options.http_host}",
        f"--http-port={options.ports.http}",
        f"--http-restricted-api={_restricted(RESTRICTED_HTTP, options)}",
    ]


def _metrics(options: ServerOptions) -> list[str]:
    if not options.metrics:
        return ["--allow-metrics=false"]
    return [f"--metrics-address={options.host}", f"--metrics-port={options.ports.metrics}"]


def _traces(options: ServerOptions) -> list[str]:
    """Spans of requests that come with a trace context, and of no others (a rate of 0)."""
    if not options.traces:
        return []
    told = [f"opentelemetry,url={options.traces}", f"opentelemetry,bsp_schedule_delay={_TRACES_EVERY}"]
    told += ["mode=opentelemetry", "level=TIMESTAMPS", "rate=0", "count=-1"]
    return [f"--trace-config={one}" for one in told]


def _restricted(names: tuple[str, ...], options: ServerOptions) -> str:
    """Triton's `APIs:header=value`."""
    return f"{','.join(names)}:llmops={options.secret}"


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
