"""Start and stop the real tritonserver on a model repository.

`start_triton` returns a `TritonServer`; `llmops serve`, `llmops up` and the test fixtures all use it. Nothing outlives
`stop()`: no process (Triton runs each Python model in a stub process) and no shared-memory segment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from llmops.errors import InputError, MissingDependencyError, ResourceError, ServerError
from llmops.model_repository.gpu_assignment import check_gpu_count
from llmops.model_repository.multi_gpu import LaunchPlan, launch_command, plan_launch
from llmops.model_repository.multi_gpu.allocation import without_slurm_variables
from llmops.model_repository.repository.compatibility import check_engines, check_server
from llmops.model_repository.repository.manifest import RepositoryManifest
from llmops.model_repository.repository.validation import check_repository, check_unedited
from llmops.model_repository.server.command import Ports as Ports
from llmops.model_repository.server.command import ServerOptions
from llmops.model_repository.server.drain import drain_engines, is_ready
from llmops.model_repository.server.exposure import EMBEDDED_HTTP_WARNING, describe_exposure
from llmops.model_repository.server.installation import Installation, find_installation
from llmops.model_repository.server.processes import (
    Process,
    descendants,
    kill_survivors,
    model_processes,
    rank_zero,
    with_parent_death_signal,
)
from llmops.model_repository.server.shared_memory import SharedMemory, remove_stale_segments
from llmops.model_repository.server.triton_log import (
    LogLine,
    explain_failure,
    failed_on_lock,
    last_error,
    parse_engine_death,
    parse_line,
)

# Triton logs this when the last in-flight request is done and only unloading is left.
_REQUESTS_DONE = "All models are stopped, unloading models"
# Seconds for that. A gRPC stream that a client keeps open, even an idle one, holds its model, and Triton would wait for
# it until the exit timeout without doing anything.
UNLOAD_GRACE = 5.0
# The longest (s) that a killed server takes to be gone.
EXIT_DETECTION_TIMEOUT = 1.0
# Seconds that mpirun gets to end the ranks that only wait for work.
_MPI_GRACE = 10.0
_LOCK_FAULT = (
    "Triton's Python backend ended at once with boost::interprocess::lock_exception, a rare fault of its shared "
    "memory; starting it once more."
)


class TritonServer:
    """A running tritonserver. `stop()` (or leaving the `with` block) drains it and removes all that it made."""

    def __init__(
        self,
        options: ServerOptions,
        begin: Callable[[ServerOptions, int], subprocess.Popen[bytes]],
        on_log: Callable[[LogLine], None],
        under_mpi: bool = False,
    ) -> None:
        """`begin` starts a process that inherits the descriptor."""
        self.host = options.host
        self.ports = options.ports
        self._options = options
        self._begin = begin
        self._on_log = on_log
        self._under_mpi = under_mpi
        self._models: dict[str, list[Process]] = {}
        self._broken = False
        self._unloading = threading.Event()
        self._ended: tuple[str, str] | None = None
        self._again = True
        self._start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def shm_prefix(self) -> str:
        return self._memory.prefix

    @property
    def grpc_address(self) -> str:
        return f"{self.host}:{self.ports.grpc}"

    @property
    def http_url(self) -> str | None:
        """None unless it was asked for."""
        return f"http://{self._options.http_host}:{self.ports.http}" if self._options.http_host else None

    @property
    def metrics_url(self) -> str | None:
        return f"http://{self.host}:{self.ports.metrics}/metrics" if self._options.metrics else None

    @property
    def exposure(self) -> str:
        """Who can reach what, and which flag closes it, in one line."""
        return describe_exposure(self.host, self._options.http_host, self._options.metrics)

    def is_ready(self) -> bool:
        """True when every model of the repository is loaded and every server listens; gRPC is the first to do so."""
        others = [(self._options.http_host, self.ports.http)] if self._options.http_host else []
        if self._options.metrics:
            others.append((self.host, self.ports.metrics))
        return is_ready(self.grpc_address) and all(_listens(*other) for other in others)

    def _is_protected_and_ready(self) -> bool:
        """Protect the shared memory that is there by now; a model that is ready has all of its."""
        ready = self.is_ready()
        self._memory.protect()
        return ready

    def wait_ready(self, timeout: float = 600, cancelled: threading.Event | None = None) -> None:
        """Block until ready, or `cancelled`. Raises ServerError with the cause if the server ends first or `timeout`
        (s) passes."""
        deadline = time.monotonic() + timeout
        while not self._is_protected_and_ready() and not (cancelled and cancelled.is_set()):
            if self.process.poll() is not None:
                self._reader.join(timeout=5)
                if not self._tries_again():
                    raise ServerError(self._failure())
            if time.monotonic() > deadline:
                raise ServerError(f"Triton was not ready after {timeout:.0f} s; see its log above")
            time.sleep(0.05)
        self._models = model_processes(self.process.pid)

    def wait(self, stop: threading.Event) -> None:
        """Block until `stop` is set. Raises ServerError if the server, a model's process or its engine ends by itself
        before."""
        while not stop.wait(0.2):
            if self._ended is not None:
                raise ServerError(_engine_ended(*self._ended))
            dead = next((name for name, group in self._models.items() if not all(one.alive for one in group)), None)
            # the models' processes end with Triton's, and may be gone before it is: what died first is to blame
            if self._ended_within(EXIT_DETECTION_TIMEOUT if dead else 0):
                raise ServerError(f"Triton ended unexpectedly with {self._ending()}")
            if dead is not None:
                self._broken = True
                raise ServerError(_model_died(dead))

    def stop(self, at_once: bool = False) -> int:
        """Let running requests end, for at most the exit timeout; SIGTERM; remove what is left. Returns its exit code.

        `at_once`, or an exception that a signal handler raises meanwhile, ends all of it without waiting.
        """
        below = descendants(self.process.pid) if self._under_mpi else []
        try:
            if self.process.poll() is None and not self._broken and not at_once:
                deadline = time.monotonic() + self._options.exit_timeout
                drain_engines(self.grpc_address, self._options.exit_timeout)
                self._finish(deadline)
        finally:
            self._kill_group()
            kill_survivors(below)
            self.process.wait()
            self._reader.join(timeout=5)
            self._memory.remove()
        return self.process.returncode

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(at_once=kind is not None and issubclass(kind, KeyboardInterrupt))

    def _start(self) -> None:
        self._memory = SharedMemory()
        try:
            self.process = self._begin(replace(self._options, shm_prefix=self._memory.prefix), self._memory.lock)
        except BaseException:
            self._memory.remove()
            raise
        self.log: deque[LogLine] = deque(maxlen=400)
        self._reader = threading.Thread(target=self._read_log, name="triton-log", daemon=True)
        self._reader.start()

    def _tries_again(self) -> bool:
        """Start the server again, in fresh shared memory, after a fault that has nothing to do with the repository."""
        if not (self._again and failed_on_lock(self.log)):
            return False
        self._again = False
        self._kill_group()
        self._memory.remove()
        self._on_log(LogLine(time.strftime("%H:%M:%S"), "warning", "", _LOCK_FAULT))
        self._start()
        return True

    def _finish(self, deadline: float) -> None:
        """Send SIGTERM; requests to models other than our engines have the rest of the time.

        mpirun would give its ranks only a second, so rank 0, which has the requests, is told first; then mpirun, which
        ends the ranks that wait for work.
        """
        if not self._under_mpi:
            self.process.send_signal(signal.SIGTERM)
            self._wait_for_exit(deadline, lambda: self.process.poll() is not None)
            return
        program = self._options.binary
        leader = rank_zero(self.process.pid, program)
        if leader is not None:
            os.kill(leader, signal.SIGTERM)
            self._wait_for_exit(deadline, lambda: rank_zero(self.process.pid, program) is None)
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_MPI_GRACE)

    def _wait_for_exit(self, deadline: float, ended: Callable[[], bool]) -> None:
        """Wait until `ended`, or until unloading takes too long after the last request or the deadline."""
        deadline = max(deadline, time.monotonic()) + UNLOAD_GRACE
        while not ended() and time.monotonic() < deadline:
            if self._unloading.is_set():
                deadline = min(deadline, time.monotonic() + UNLOAD_GRACE)
                self._unloading.clear()
            time.sleep(0.05)

    def _kill_group(self) -> None:
        # Stubs end with their server; one that hangs in a library call does not.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _failure(self) -> str:
        cause = explain_failure(self.log) or f"it ended with code {self.process.returncode} and said nothing"
        return f"Triton did not start: {cause}."

    def _ended_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def _ending(self) -> str:
        self._reader.join(timeout=5)
        code = self.process.returncode
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        if code == -signal.SIGKILL:
            name += "; the kernel sends it when memory runs out (see dmesg)"
        error = last_error(self.log)
        if error is None:
            return f"code {code}{name}."
        when = f" ({error.time})" if error.time else ""
        return f"code {code}{name}; the last error in its log{when} was: {error.message.strip()}"

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = parse_line(raw.decode(errors="replace").rstrip("\n"))
            self.log.append(line)
            if _REQUESTS_DONE in line.message:
                self._unloading.set()
            self._ended = self._ended or parse_engine_death(line)
            self._on_log(line)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _model_died(model: str) -> str:
    # Triton 2.51 neither starts it again nor ends its streams, and goes on calling the model ready
    return (
        f"The process of model {model} ended unexpectedly (see the log above), and Triton would leave its requests "
        "waiting forever, so the server stops now. Start it again; systemd or Kubernetes does so by itself."
    )


def _engine_ended(model: str, reason: str) -> str:
    return (
        f"The engine of model {model} has ended: {reason}. Its requests have been told; the others are being finished. "
        "Start it again; systemd or Kubernetes does so by itself."
    )


def print_log(line: LogLine) -> None:
    """The default log: readable lines on stderr, without what is said at each start."""
    if not line.is_noise:
        print(line, file=sys.stderr, flush=True)


def start_triton(
    repository: Path,
    *,
    ports: Ports | None = None,
    host: str = "127.0.0.1",
    exit_timeout: int = 30,
    verbose: int = 0,
    launch: str = "auto",
    http: bool = False,
    metrics: bool = True,
    traces: str = "",
    strict: bool = False,
    on_log: Callable[[LogLine], None] = print_log,
    installation: Installation | None = None,
) -> TritonServer:
    """Start tritonserver on `repository`, under mpirun where an engine wants it; call `wait_ready()` next.

    `exit_timeout`: seconds that running requests get at a stop; `launch`: one of multi_gpu.LAUNCHES; `http`, `metrics`:
    whether these servers run; `traces`: the URL of what takes Triton's own spans; `strict`: an edited repository is
    refused. It also ends when the calling process
    dies, however it dies. Raises InputError, ResourceError, VersionMismatchError or MissingDependencyError with the
    fix.
    """
    models, marker = check_repository(repository), RepositoryManifest.load(repository)
    edited = check_unedited(repository, marker, strict)
    if edited:
        on_log(LogLine(time.strftime("%H:%M:%S"), "warning", "", edited))
    plan = plan_launch(marker, launch)
    installation = installation or find_installation()
    check_server(marker, models, installation.backends)
    check_engines(marker)
    http_host = installation.http_host(host) if http else ""
    chosen = _choose_ports(host, ports or Ports(), http_host, metrics)
    if http and installation.kind == "embedded":
        on_log(LogLine(time.strftime("%H:%M:%S"), "warning", "", EMBEDDED_HTTP_WARNING))
    remove_stale_segments()
    options = ServerOptions(
        binary=str(installation.binary),
        repository=str(repository.resolve()),
        backends=str(installation.backends),
        host=host,
        ports=chosen,
        http_host=http_host,
        metrics=metrics,
        traces=traces,
        exit_timeout=exit_timeout,
        verbose=verbose,
    )
    if marker.uses_gpus:
        check_gpu_count(plan.gpus)
    begin = partial(_begin, plan, installation)
    return TritonServer(options, begin, on_log, under_mpi=plan.launch != "single")


def _begin(plan: LaunchPlan, installation: Installation, options: ServerOptions, lock: int) -> subprocess.Popen[bytes]:
    command, environment = launch_command(options, plan)
    inherited = without_slurm_variables(os.environ) if plan.launch == "single" else dict(os.environ)
    environment = {**inherited, **installation.environment, **environment}
    _check_program(command[0], environment["PATH"])
    return subprocess.Popen(
        with_parent_death_signal(command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=(lock,),
        # for files of its models; Triton's shared memory has modes of its own (SharedMemory.protect)
        umask=0o077,
    )


def _check_program(program: str, path: str) -> None:
    if shutil.which(program, path=path) is None:
        raise MissingDependencyError(
            f"{program} is not on PATH, and engines of several GPUs start with it: run this in NVIDIA's image, or "
            "install Open MPI."
        )


def _choose_ports(host: str, ports: Ports, http_host: str, metrics: bool) -> Ports:
    """Free ones for those that are 0; ports of servers that are off stay as they are."""
    given = {"grpc": (host, ports.grpc)}
    if http_host:
        given["http"] = (http_host, ports.http)
    if metrics:
        given["metrics"] = (host, ports.metrics)
    fixed = [port for _, port in given.values() if port]
    if len(set(fixed)) != len(fixed):
        names = ", ".join(f"{name} {port}" for name, (_, port) in given.items())
        raise InputError(f"Two servers have the same port ({names}); give each its own.")
    with contextlib.ExitStack() as stack:
        chosen = {name: _reserve(stack, address, name, port) for name, (address, port) in given.items()}
    return replace(ports, **chosen)


def _reserve(stack: contextlib.ExitStack, host: str, name: str, port: int) -> int:
    listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ResourceError(
            f"Port {port} on {host} cannot be used for {name} ({error.strerror}); stop what listens there, "
            f"or choose another with --{name}-port (0 takes any free one)."
        ) from error
    return int(listener.getsockname()[1])
