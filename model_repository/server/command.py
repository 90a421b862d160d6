"""The tritonserver command line."""

import secrets
from dataclasses import dataclass, field

#: APIs that are closed to all clients, by the names in triton-inference-server/server
#: src/restricted_features.h (2.51 to 2.71). A client could map the backend's own memory, write a
#: file of its choice (trace_file, log_file) or change what is loaded.
RESTRICTED = ("shared-memory", "trace", "logging")
#: APIs that are closed to all HTTP clients. The gateway finds models through gRPC's repository
#: index; loading is off (--model-control-mode).
RESTRICTED_HTTP = (*RESTRICTED, "model-repository")
#: Prefix of shared-memory segments. Triton refuses to map segments that start like this
#: (kTritonSharedMemoryRegionPrefix in src/common.h, since 25.07).
SHM_PREFIX = "triton_python_backend_shm_region_llmops_"
#: Seconds that a Python model may take to load. A large engine takes minutes.
_STUB_TIMEOUT = 1800
#: Milliseconds between two pings of a gateway on a silent connection that Triton allows. Its own
#: 300 s would end a connection with "too_many_pings" after 80 s without data, and its requests.
MIN_PING_INTERVAL = 10_000
#: Milliseconds between two exports of spans.
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
        http: Whether the HTTP server runs.
        metrics: Whether the metrics server runs.
        traces: The OTLP URL that receives Triton's own spans, or an empty text.
        exit_timeout: Seconds that running requests have when the server stops.
        verbose: The level of Triton's verbose log.
        launch: `auto`, or the mode of a `LaunchPlan`.
        visible_gpus: The server's CUDA_VISIBLE_DEVICES, or an empty text for that of the caller.
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
        backends: The backend folder. Empty for the program's own.
        http_host: The address of the HTTP server. Empty for none.
        shm_prefix: Prefix of the server's shared-memory segments.
        secret: Value of the header that opens the restricted APIs. It is never disclosed, because
            no client needs these APIs.
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
        # a rate of 0 traces the requests that carry a trace context, and no others
        settings = [*exporter, "mode=opentelemetry", "level=TIMESTAMPS", "rate=0", "count=-1"]
        command += [f"--trace-config={setting}" for setting in settings]
    return command


def follower_command(options: ServerOptions, models: list[str]) -> list[str]:
    """Return the command of another MPI rank: it loads only the engine models, and opens no port."""
    return [
        *_common(options),
        "--allow-http=false",
        "--allow-grpc=false",
        "--allow-metrics=false",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
    ]


def _restricted(names: tuple[str, ...], options: ServerOptions) -> str:
    """Return Triton's `APIs:header=value`."""
    return f"{','.join(names)}:llmops={options.secret}"


def _common(options: ServerOptions) -> list[str]:
    return [
        options.binary,
        f"--model-repository={options.repository}",
        *([f"--backend-directory={options.backends}"] if options.backends else []),
        # as NVIDIA's launcher: config.pbtxt alone decides what is served
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={options.launch.exit_timeout}",
        f"--log-verbose={options.launch.verbose}",
        f"--backend-config=python,shm-region-prefix-name={options.shm_prefix}",
        f"--backend-config=python,stub-timeout-seconds={_STUB_TIMEOUT}",
    ]
