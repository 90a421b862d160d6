"""The tritonserver command line."""

import secrets
from dataclasses import dataclass, field

#: APIs that are closed to all clients, by their names in triton-inference-server/server
#: src/restricted_features.h (2.51 to 2.71). Through these APIs a client could map the backend's
#: memory, write any file (trace_file, log_file) or load and unload models.
RESTRICTED = ("shared-memory", "trace", "logging")
#: APIs that are also closed to all HTTP clients. Over gRPC the index stays open, because the
#: gateway finds models through it; loading is off (--model-control-mode).
RESTRICTED_HTTP = (*RESTRICTED, "model-repository")
#: Prefix of the names of shared-memory segments. Since 25.07, Triton does not map segments with
#: this prefix for clients (kTritonSharedMemoryRegionPrefix in src/common.h).
SHM_PREFIX = "triton_python_backend_shm_region_llmops_"
#: Maximum seconds in which a Python model must load. A large engine takes minutes.
_STUB_TIMEOUT = 1800
#: Minimum milliseconds between two pings on a silent connection that Triton accepts. Triton's
#: default of 300 s would end a gateway's connection, and the requests on it, with "too_many_pings"
#: after 80 s without data.
MIN_PING_INTERVAL = 10_000
#: Milliseconds between two exports of Triton's spans.
_TRACES_PERIOD = 1000


@dataclass(frozen=True)
class Ports:
    """The ports of a tritonserver. 0 stands for any free port."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass(frozen=True)
class LaunchOptions:
    """The choices of the user for a server.

    Attributes:
        host: The address of the gRPC and the metrics server.
        ports: The ports of all servers.
        http: True to run the HTTP server.
        metrics: True to run the metrics server.
        traces: The OTLP URL that receives Triton's own spans, or an empty text.
        exit_timeout: Maximum seconds that the server waits for running requests when it stops.
        verbose: The level of Triton's verbose log; 0 is off.
        launch: `auto`, or the mode of a `LaunchPlan`.
        visible_gpus: The server's CUDA_VISIBLE_DEVICES. If empty, the caller's value applies.
    """

    host: str = "127.0.0.1"
    ports: Ports = Ports()
    http: bool = False
    metrics: bool = True
    traces: str = ""
    exit_timeout: int = 30
    verbose: int = 0
    launch: str = "auto"
    visible_gpus: str = ""


@dataclass(frozen=True)
class ServerOptions:
    """The options of every rank of a server.

    Attributes:
        binary: The tritonserver program.
        repository: The model repository.
        launch: The choices of the user.
        backends: The backend folder. If empty, the program uses its default folder.
        http_host: The address of the HTTP server. If empty, the server is off.
        shm_prefix: Prefix of the server's shared-memory segments.
        secret: Value of the header that opens the restricted APIs. The value is never
            disclosed, because no client needs these APIs.
    """

    binary: str
    repository: str
    launch: LaunchOptions = LaunchOptions()
    backends: str = ""
    http_host: str = ""
    shm_prefix: str = SHM_PREFIX
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)


def server_command(options: ServerOptions) -> list[str]:
    """Return the command of a tritonserver that loads all models of the repository."""
    launch = options.launch
    command = [
        *_common(options),
        "--model-control-mode=none",
        f"--grpc-address={launch.host}",
        f"--grpc-port={launch.ports.grpc}",
        f"--grpc-restricted-protocol={_restricted(RESTRICTED, options)}",
        f"--grpc-http2-min-recv-ping-interval-without-data={MIN_PING_INTERVAL}",
    ]
    if options.http_host:
        command += [
            f"--http-address={options.http_host}",
            f"--http-port={launch.ports.http}",
            f"--http-restricted-api={_restricted(RESTRICTED_HTTP, options)}",
        ]
    else:
        command.append("--allow-http=false")
    if launch.metrics:
        command += [f"--metrics-address={launch.host}", f"--metrics-port={launch.ports.metrics}"]
    else:
        command.append("--allow-metrics=false")
    if launch.traces:
        exporter = [f"opentelemetry,url={launch.traces}", f"opentelemetry,bsp_schedule_delay={_TRACES_PERIOD}"]
        # a rate of 0 traces only the requests that carry a trace context
        settings = [*exporter, "mode=opentelemetry", "level=TIMESTAMPS", "rate=0", "count=-1"]
        command += [f"--trace-config={setting}" for setting in settings]
    return command


def follower_command(options: ServerOptions, models: list[str]) -> list[str]:
    """Return the command of an MPI rank that loads only the engine models and opens no port."""
    return [
        *_common(options),
        "--allow-http=false",
        "--allow-grpc=false",
        "--allow-metrics=false",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
    ]


def _restricted(names: tuple[str, ...], options: ServerOptions) -> str:
    """Return the value with which Triton requires the secret of `options` for the APIs `names`.

    The form of the value is `APIs:header=value`.
    """
    return f"{','.join(names)}:llmops={options.secret}"


def _common(options: ServerOptions) -> list[str]:
    return [
        options.binary,
        f"--model-repository={options.repository}",
        *([f"--backend-directory={options.backends}"] if options.backends else []),
        # like NVIDIA's launcher, disable auto-completion, so that config.pbtxt alone decides what
        # is served
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={options.launch.exit_timeout}",
        f"--log-verbose={options.launch.verbose}",
        f"--backend-config=python,shm-region-prefix-name={options.shm_prefix}",
        f"--backend-config=python,stub-timeout-seconds={_STUB_TIMEOUT}",
    ]
