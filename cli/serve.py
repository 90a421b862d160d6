"""`llmops serve`: run the real Triton server on a model repository."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from llmops.cli.options import ANY_PATH, Duration, reject_options
from llmops.cli.output import print_line
from llmops.connection_errors import check_url
from llmops.errors import InputError, ServerError

if TYPE_CHECKING:
    from llmops.model_repository.launch import TritonServer
    from llmops.model_repository.server.fault_watch import FaultSources

PORT = click.IntRange(0, 65535)


@click.command()
@click.argument("repository", type=ANY_PATH)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--http", is_flag=True, help="Also start Triton's HTTP server. The embedded Triton's listens on 127.0.0.1 only."
)
@click.option("--http-port", type=PORT, default=8000, help="Port of the HTTP server, with --http; 0 takes any.")
@click.option("--grpc-port", type=PORT, default=8001, help="Port of Triton's gRPC endpoint; 0 takes any.")
@click.option("--metrics-port", type=PORT, default=8002, help="Port of Triton's metrics; 0 takes any.")
@click.option("--metrics/--no-metrics", default=True, help="Serve Triton's Prometheus metrics.")
@click.option("--traces", metavar="URL", help="OTLP receiver for Triton's own spans, http://HOST:4318/v1/traces.")
@click.option(
    "--exit-timeout",
    type=Duration(zero=True, whole=True),
    default="30s",
    help="Time that running requests get at shutdown.",
)
@click.option(
    "--ready-timeout", type=Duration(whole=True), default="30m", help="Time that all models may take to load."
)
@click.option(
    "--hang-timeout",
    type=Duration(zero=True, whole=True),
    default="2m",
    help="Kill a server whose engine has requests and makes no step for this long; 0 for never.",
)
@click.option(
    "--gpu-faults",
    multiple=True,
    metavar="SOURCE",
    help="Drain and stop on GPU errors found in SOURCE: a kernel log such as /dev/kmsg, or the URL of DCGM's exporter "
    "or of node-problem-detector's metrics. Repeatable.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    help="Number of times in 10 minutes that a server which ended or hangs is started again.",
)
@click.option(
    "--launch",
    type=click.Choice(["auto", "single", "leader", "orchestrator"]),
    default="auto",
    help="TensorRT engines of several GPUs: one tritonserver per GPU (leader), or one that starts workers.",
)
@click.option("--dry-run", is_flag=True, help="Print the exact command that would be run; start nothing.")
@click.option(
    "--export",
    type=click.Choice(["lws", "slurm"]),
    help="Print what starts REPOSITORY on several machines: Kubernetes manifests (LeaderWorkerSet) or a Slurm script.",
)
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, help="With --export: number of GPUs of a machine.")
@click.option(
    "--image",
    help="With --export: the container image. lws needs the pushed image of Dockerfile.trtllm; slurm has NVIDIA's.",
)
@click.option("--claim", default="models", help="With --export lws: the volume claim of the engines.")
@click.option("--strict", is_flag=True, help="Refuse a repository that was edited since `llmops repo` made it.")
@click.option("-v", "--verbose", count=True, show_default=False, help="Triton's verbose log; twice for more.")
def command(
    repository: Path,
    host: str,
    http: bool,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    metrics: bool,
    traces: str | None,
    exit_timeout: int,
    ready_timeout: int,
    hang_timeout: int,
    gpu_faults: tuple[str, ...],
    restarts: int,
    launch: str,
    dry_run: bool,
    export: str | None,
    gpus_per_node: int,
    image: str | None,
    claim: str,
    strict: bool,
    verbose: int,
) -> None:
    """Run Triton on REPOSITORY (see `llmops repo`) until Ctrl-C or SIGTERM.

    An engine of NVIDIA's C++ backend for several GPUs is started under mpirun. Triton is
    ready only when every model is loaded. At shutdown, running requests are finished first, for at
    most --exit-timeout; then no process and no shared memory is left. A second signal ends running
    requests at once.
    """
    from llmops.background_output import write_in_background
    from llmops.model_repository.launch import start_triton
    from llmops.model_repository.server.command import LaunchOptions, Ports
    from llmops.model_repository.server.fault_watch import MachineFaultError, RestartBudget

    if not http and click.get_current_context().get_parameter_source("http_port") != ParameterSource.DEFAULT:
        raise click.UsageError("--http-port is for Triton's HTTP server, which is off: add --http")
    if traces:
        check_url(traces, "--traces")
    if not metrics:
        reject_options("--no-metrics leaves Triton's metrics server off", "metrics_port")
    _check_export_options(export)
    options = LaunchOptions(
        host=host,
        ports=Ports(http=http_port, grpc=grpc_port, metrics=metrics_port),
        http=http,
        metrics=metrics,
        traces=traces or "",
        exit_timeout=exit_timeout,
        verbose=verbose,
        launch=launch,
    )
    if export is not None:
        from llmops.model_repository.multi_gpu import export_launch

        text = export_launch(export, repository, options, gpus_per_node=gpus_per_node, image=image, claim=claim)
        click.echo(text, nl=False)
        return None
    if dry_run:
        from llmops.model_repository.dry_run import describe_launch

        click.echo(describe_launch(repository, options, strict))
        return None
    # neither Triton, whose log this process reads, nor a restart waits for the reader of the output
    write_in_background()
    stop, sources, budget = _stop_event(), _fault_sources(gpu_faults, hang_timeout), RestartBudget(restarts)

    def run() -> None:
        with start_triton(repository, options, strict=strict) as server:
            server.wait_ready(ready_timeout, cancelled=stop)
            if not stop.is_set():
                _announce(server)
            server.wait(stop, sources)
            if stop.is_set():
                click.echo("Stopping: finishing the running requests.")

    while True:
        try:
            return run()
        except MachineFaultError:
            raise
        except ServerError as error:
            if not restarts or stop.is_set():
                raise
            if not budget.take(time.monotonic()):
                cause = "see the log above for the common cause."
                raise ServerError(f"{error} {budget.spent_message}: {cause}") from error
            print_line(f"{error} Starting it again.", err=True)


def _check_export_options(export: str | None) -> None:
    if export is None:
        reject_options("Only files of --export contain this", "gpus_per_node", "image", "claim")
    else:
        watching = ("ready_timeout", "hang_timeout", "gpu_faults", "restarts", "strict")
        reject_options("The cluster watches what --export describes, not this command", *watching)
    if export == "slurm":
        reject_options("A Slurm script mounts folders, not a claim", "claim")


def _fault_sources(names: tuple[str, ...], hang_timeout: int) -> FaultSources:
    from llmops.model_repository.server.fault_watch import FaultSources

    pages = [name for name in names if name.startswith(("http://", "https://"))]
    logs = [Path(name) for name in names if name not in pages]
    if len(logs) > 1:
        raise InputError(f"--gpu-faults names two logs, {logs[0]} and {logs[1]}; leave one out.")
    if logs and not os.access(logs[0], os.R_OK):
        raise InputError(f"--gpu-faults {logs[0]} cannot be read; name a kernel log that this user may read.")
    return FaultSources(logs[0] if logs else None, pages, hang_timeout)


def _announce(server: TritonServer) -> None:
    servers = {"gRPC": server.grpc_address, "HTTP": server.http_url, "metrics": server.metrics_url}
    click.echo("Ready. " + ", ".join(f"{name} {address}" for name, address in servers.items() if address))
    click.echo(server.exposure)
    click.echo(f"Serve OpenAI requests from it: llmops gateway --triton {server.grpc_address}")


def _stop_event() -> threading.Event:
    event = threading.Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if event.is_set():
            # from the second signal on, end the remaining processes without waiting for a third
            # signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt
        event.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return event
