"""The start and stop of a tritonserver on a model repository.

`start_triton` returns a `TritonServer`; `llmops serve`, `llmops up` and the test fixtures all use
it. Nothing outlives `stop()`: no process (Triton runs each Python model in a stub process) and no
shared-memory segment.
"""

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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llmops.errors import InputError, MissingDependencyError, ResourceError, ServerError
from llmops.model_repository.gpu_assignment import check_gpu_count, share_gpus
from llmops.model_repository.multi_gpu.launch_plan import (
    OVERSUBSCRIBE,
    LaunchPlan,
    launch_command,
    plan_launch,
    without_slurm_variables,
)
from llmops.model_repository.repository.compatibility import check_engines, check_server
from llmops.model_repository.repository.manifest import RepositoryManifest
from llmops.model_repository.repository.validation import check_repository, check_unedited
from llmops.model_repository.server.command import LaunchOptions, ServerOptions
from llmops.model_repository.server.command import Ports as Ports
from llmops.model_repository.server.drain import drain_engines, is_ready
from llmops.model_repository.server.exposure import EMBEDDED_HTTP_WARNING, describe_exposure
from llmops.model_repository.server.fault_watch import (
    WATCH_INTERVAL,
    FaultSources,
    FaultWatch,
    MachineFaultError,
)
from llmops.model_repository.server.installation import Installation, find_installation
from llmops.model_repository.server.model_processes import LoadWatch, model_processes, rank_zero
from llmops.model_repository.server.shared_memory import SharedMemory, remove_stale_segments
from llmops.model_repository.server.triton_log import (
    LOCK_EXCEPTION,
    LogLine,
    explain_failure,
    failed_on_lock,
    failed_on_port,
    last_error,
    parse_engine_death,
    parse_line,
    parse_loop_end,
    parse_worker_failure,
)
from llmops.process import Process, descendants, kill_survivors, with_parent_death_signal

#: Triton's log message after its last in-flight request, before it unloads the models.
_REQUESTS_DONE = "All models are stopped, unloading models"
#: Maximum seconds for unloading. Triton would wait until the exit timeout for every gRPC stream
#: that a client keeps open, even an idle stream, because the stream holds its model.
UNLOAD_GRACE = 5.0
#: Seconds to wait for the end of the server after a model's process has ended. A server that still
#: runs then has lost only the model's process.
EXIT_DETECTION_TIMEOUT = 1.0
#: Maximum seconds in which mpirun must end the ranks that only wait for work.
_MPI_GRACE = 10.0
#: Maximum seconds to read the last lines of the log after the server has ended. Another process may
#: keep the pipe of the log open.
_LOG_TIMEOUT = 5.0
_LOCK_FAULT = (
    f"Triton's Python backend ended at its start with {LOCK_EXCEPTION}, a rare fault of its shared memory; "
    "starting it once more."
)

_PORT_TAKEN = "Another process took a free port before Triton could; starting it once more on other ports."


class TritonServer:
    """A running tritonserver.

    `stop()`, or leaving the `with` block, drains the server and removes everything that it created.
    """

    def __init__(
        self,
        options: ServerOptions,
        begin: Callable[[ServerOptions, int], subprocess.Popen[bytes]],
        on_log: Callable[[LogLine], None],
        under_mpi: bool = False,
        choose_ports: Callable[[], Ports] | None = None,
    ) -> None:
        """Start the server.

        Args:
            options: The command-line options of the server.
            begin: Starts a process that inherits a file descriptor.
            on_log: Called with each line of the log.
            under_mpi: True if the process is mpirun instead of tritonserver.
            choose_ports: Returns other ports for a second start. None if the user has chosen all
                ports.
        """
        self._choose_ports = choose_ports
        self.host, self.ports = options.launch.host, options.launch.ports
        self._options = options
        self._begin = begin
        self._on_log = on_log
        self._under_mpi = under_mpi
        self._models: dict[str, list[Process]] = {}
        # processes below the server when it was ready, because processes of a dead model have
        # another parent
        self._below: list[Process] = []
        self._is_broken = False
        self._unloading = threading.Event()
        self._dead_engine: tuple[str, str] | None = None
        self._may_restart = True
        # makes sure that a restart in one thread does not start a server after a stop in another
        self._starting, self._is_stopped = threading.Lock(), False
        self._start()

    @property
    def pid(self) -> int:
        """The process id of tritonserver or mpirun."""
        return self.process.pid

    @property
    def shm_prefix(self) -> str:
        """The prefix of the server's shared-memory segments."""
        return self._memory.prefix

    @property
    def grpc_address(self) -> str:
        """HOST:PORT of the gRPC server."""
        return f"{self.host}:{self.ports.grpc}"

    @property
    def http_url(self) -> str | None:
        """The URL of the HTTP server, or None if it is off."""
        return f"http://{self._options.http_host}:{self.ports.http}" if self._options.http_host else None

    @property
    def metrics_url(self) -> str | None:
        """The URL of the metrics, or None if they are off."""
        return f"http://{self.host}:{self.ports.metrics}/metrics" if self._options.launch.metrics else None

    @property
    def exposure(self) -> str:
        """A line that says which servers other machines can reach, and which flags close them."""
        return describe_exposure(self.host, self._options.http_host, self._options.launch.metrics)

    def is_ready(self) -> bool:
        """Return True if all models are loaded and all servers listen.

        The gRPC server listens before the HTTP and metrics servers do.
        """
        others = [(self._options.http_host, self.ports.http)] if self._options.http_host else []
        if self._options.launch.metrics:
            others.append((self.host, self.ports.metrics))
        return is_ready(self.grpc_address) and all(_listens(*other) for other in others)

    def _is_protected_and_ready(self) -> bool:
        """Protect the segments, and return True if the server is ready.

        A model that is ready has created all of its segments.
        """
        ready = self.is_ready()
        self._memory.protect()
        return ready

    def wait_ready(self, timeout: float = 600, cancelled: threading.Event | None = None) -> None:
        """Block until the server is ready, or `cancelled` is set.

        Raises:
            ServerError: The server ended, or was not ready after `timeout` seconds.
        """
        looked = time.monotonic()
        deadline, watch = looked + timeout, LoadWatch()
        while not self._is_protected_and_ready() and not (cancelled and cancelled.is_set()):
            if self.process.poll() is not None:
                self._reader.join(_LOG_TIMEOUT)
                if not self._restart_once():
                    raise ServerError(self._failure())
                watch = LoadWatch()
            if time.monotonic() - looked > WATCH_INTERVAL:
                looked = time.monotonic()
                if lost := watch.find_lost(self.process.pid, looked, self._worker_failure):
                    self._is_broken = True
                    raise ServerError(self._failure(lost))
            if time.monotonic() > deadline:
                raise ServerError(f"Triton was not ready after {timeout:.0f} s; see its log above")
            time.sleep(0.05)
        self._models, self._below = model_processes(self.process.pid), descendants(self.process.pid)

    def wait(self, stop: threading.Event, sources: FaultSources = FaultSources()) -> None:
        """Block until `stop` is set.

        Args:
            stop: Ends the wait.
            sources: The sources of signs of machine faults and hangs.

        Raises:
            MachineFaultError: The machine has a fault. Call `stop()`, which lets running requests
                end or fail over.
            ServerError: The server, a model's process or an engine ended by itself, or hangs.
        """
        with contextlib.closing(FaultWatch(sources, self.metrics_url)) as watch:
            self._wait(stop, watch)

    def _wait(self, stop: threading.Event, watch: FaultWatch) -> None:
        looked = time.monotonic()
        while not stop.wait(0.2):
            if time.monotonic() - looked > WATCH_INTERVAL:
                looked = time.monotonic()
                self._look(watch, looked)
            if self._dead_engine is not None:
                raise ServerError(_engine_ended(*self._dead_engine))
            if self._loop_end:
                self._is_broken = True
                raise ServerError(
                    f"A worker of TensorRT-LLM has ended its loop: {self._loop_end}. All requests would "
                    "wait forever, so the server is killed. Gateways continue the running answers on other replicas."
                )
            dead = next(
                (name for name, group in self._models.items() if not all(process.is_alive for process in group)), None
            )
            # the processes of models end with Triton and may be gone before it, so wait for Triton
            # before blaming a model
            if self._ended_within(EXIT_DETECTION_TIMEOUT if dead else 0):
                raise ServerError(f"Triton ended unexpectedly with {self._ending()}")
            if dead is not None:
                self._is_broken = True
                raise ServerError(_model_died(dead))

    def _look(self, watch: FaultWatch, now: float) -> None:
        if fault := watch.find_fault(now):
            raise MachineFaultError(
                f"The machine has a fault: {fault}. The server drains, so that its answers move to other replicas; "
                "repair or replace the GPU before you start it here again (runbook GpuNodeFailure)."
            )
        if hanging := watch.find_hang(now):
            self._is_broken = True
            raise ServerError(
                f"The engine of model {hanging} has requests and made no step for longer than --hang-timeout, although "
                "it is reported ready, so the server is killed. Gateways continue its answers on other replicas."
            )

    def stop(self, at_once: bool = False, timeout: float | None = None) -> int:
        """Let running requests end, then stop the server and clean up after it.

        Requests have at most `timeout` seconds to end, by default the exit timeout.

        With `at_once`, or when a signal handler raises an exception meanwhile, kill everything
        without waiting.

        Returns:
            The exit code of the server.
        """
        with self._starting:
            self._is_stopped = True
        return self._end(at_once, timeout)

    def _end(self, at_once: bool = False, timeout: float | None = None) -> int:
        # Open MPI's daemon, and the workers of the LLM API below it, run in separate sessions and
        # can outlive a model's process that was killed
        below = self._below + descendants(self.process.pid)
        try:
            if self.process.poll() is None and not self._is_broken and not at_once:
                timeout = self._options.launch.exit_timeout if timeout is None else timeout
                deadline = time.monotonic() + timeout
                drain_engines(self.grpc_address, timeout)
                self._finish(deadline)
        finally:
            self._kill_group()
            kill_survivors(below)
            self.process.wait()
            self._reader.join(_LOG_TIMEOUT)
            self._memory.remove()
        return self.process.returncode

    def restart(self) -> None:
        """Start the server again on its ports, after `wait` has raised an error.

        Call `wait_ready` next. The server ends with the calling thread.
        """
        self._end()
        self._models, self._below, self._is_broken, self._dead_engine = {}, [], False, None
        self._unloading.clear()
        with self._starting:
            if not self._is_stopped:
                self._start()

    def __enter__(self) -> Self:
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
        self._worker_failure = self._loop_end = ""
        self._reader = threading.Thread(target=self._read_log, name="triton-log", daemon=True)
        self._reader.start()

    def _restart_once(self) -> bool:
        """Restart the server once, after the known shared-memory fault or the loss of a free port.

        Return True if the server was restarted.
        """
        port_taken = self._choose_ports is not None and failed_on_port(self.log)
        if not (self._may_restart and (port_taken or failed_on_lock(self.log))):
            return False
        self._may_restart = False
        self._kill_group()
        self._memory.remove()
        self._on_log(_warning(_PORT_TAKEN if port_taken else _LOCK_FAULT))
        if port_taken and self._choose_ports is not None:
            self.ports = self._choose_ports()
            self._options = replace(self._options, launch=replace(self._options.launch, ports=self.ports))
        self._start()
        return True

    def _finish(self, deadline: float) -> None:
        """Send SIGTERM.

        Requests to other models than our engines may use the rest of the exit timeout. mpirun gives
        its ranks only a second. So rank 0, which has the requests, gets the signal first, followed
        by mpirun, which ends the ranks that wait for work.
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
        """Wait until `ended` returns True.

        The wait lasts at most UNLOAD_GRACE after the last request or the deadline.
        """
        deadline = max(deadline, time.monotonic()) + UNLOAD_GRACE
        while not ended() and time.monotonic() < deadline:
            if self._unloading.is_set():
                deadline = min(deadline, time.monotonic() + UNLOAD_GRACE)
                self._unloading.clear()
            time.sleep(0.05)

    def _kill_group(self) -> None:
        # a stub ends with its server, unless it hangs in a library call
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _failure(self, lost: str = "") -> str:
        if self._worker_failure:
            # the model's exception only says that a worker failed, so prefer the worker's error
            cause = f"TensorRT-LLM failed {self._worker_failure}"
        elif explained := explain_failure(self.log):
            cause = explained
        elif lost:
            cause = (
                f"a process of model {lost} ended while it loaded; the kernel kills it when memory runs out (see dmesg)"
            )
        else:
            cause = f"it ended with code {self.process.returncode} and an empty log"
        return f"Triton did not start: {cause}."

    def _ended_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def _ending(self) -> str:
        self._reader.join(_LOG_TIMEOUT)
        code = self.process.returncode
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        if code == -signal.SIGKILL:
            name += "; the kernel sends it when memory runs out (see dmesg)"
        error = last_error(self.log)
        if error is None:
            return f"code {code}{name}."
        if LOCK_EXCEPTION in error.message:
            name += "; its Python backend aborts so when a process of a model is killed (see dmesg)"
        when = f" ({error.time})" if error.time else ""
        return f"code {code}{name}; the last error in its log{when} was: {error.message.strip()}"

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = parse_line(raw.decode(errors="replace").rstrip("\n"))
            self.log.append(line)
            if _REQUESTS_DONE in line.message:
                self._unloading.set()
            self._dead_engine = self._dead_engine or parse_engine_death(line)
            self._worker_failure = self._worker_failure or parse_worker_failure(line)
            self._loop_end = self._loop_end or parse_loop_end(line)
            self._on_log(line)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _model_died(model: str) -> str:
    # Triton 2.51 neither restarts the process nor ends its streams, and still reports the model as
    # ready. TensorRT-LLM 1.2 waits forever for a worker that was killed, as reported in
    # NVIDIA/TensorRT-LLM #16338.
    return (
        f"A process of model {model} ended unexpectedly (see the log above), and Triton would leave its requests "
        "waiting forever, so the server stops now. Start the server again; systemd or Kubernetes does so by itself."
    )


def _engine_ended(model: str, reason: str) -> str:
    return (
        f"The engine of model {model} has ended: {reason}. Its requests have failed, and the requests of "
        "other models are being finished. Start the server again; systemd or Kubernetes does so by itself."
    )


def print_log(line: LogLine) -> None:
    """Print a line of the log to stderr, except lines that Triton logs at every start."""
    if not line.is_noise:
        print(line, file=sys.stderr, flush=True)


def gpus_of_replicas(repository: Path, replicas: int) -> Sequence[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each of several servers of a repository.

    An empty text stands for all GPUs. Raises ResourceError if this machine has too few GPUs.
    """
    manifest = RepositoryManifest.load(repository)
    if replicas == 1 or not manifest.uses_gpus:
        return [""] * replicas
    return share_gpus(plan_launch(manifest).gpus, replicas)


def start_triton(
    repository: Path,
    options: LaunchOptions | None = None,
    *,
    strict: bool = False,
    on_log: Callable[[LogLine], None] = print_log,
    installation: Installation | None = None,
    **fields: Any,
) -> TritonServer:
    """Start tritonserver on `repository`, under mpirun if an engine needs it.

    Call `wait_ready()` next.

    The server ends when the calling process dies, however it dies.

    Args:
        repository: The model repository.
        options: The choices of the user, by default those of `LaunchOptions`.
        strict: True to reject a repository that was edited.
        on_log: Called with each line of the log.
        installation: The Triton installation to start, by default this machine's.
        fields: Fields of `LaunchOptions` to replace in `options`.

    Raises:
        InputError: The repository or a port cannot be used.
        ResourceError: A port, shared memory or a GPU is missing.
        VersionMismatchError: The server cannot run an engine.
        MissingDependencyError: The server, or a program that it needs, is not installed.
    """
    options = replace(options or LaunchOptions(), **fields)
    models, manifest = check_repository(repository), RepositoryManifest.load(repository)
    edited = check_unedited(repository, manifest, strict)
    if edited:
        on_log(_warning(edited))
    plan = plan_launch(manifest, options.launch)
    installation = installation or find_installation()
    check_server(manifest, models, installation.backends)
    check_engines(manifest)
    server = installation.server_options(repository, options)
    choose_ports = partial(_choose_ports, server)
    has_free_ports = 0 in (options.ports.grpc, options.ports.http, options.ports.metrics)
    server = replace(server, launch=replace(options, ports=choose_ports()))
    if options.http and installation.kind == "embedded":
        on_log(_warning(EMBEDDED_HTTP_WARNING))
    remove_stale_segments()
    if manifest.uses_gpus:
        check_gpu_count(plan.gpus)
    return TritonServer(
        server,
        partial(_begin, plan, installation),
        on_log,
        under_mpi=plan.mode != "single",
        choose_ports=choose_ports if has_free_ports else None,
    )


def _warning(text: str) -> LogLine:
    return LogLine(time=time.strftime("%H:%M:%S"), level="warning", where="", message=text)


def _begin(plan: LaunchPlan, installation: Installation, options: ServerOptions, lock: int) -> subprocess.Popen[bytes]:
    command, environment = launch_command(options, plan)
    inherited = without_slurm_variables(os.environ) if plan.mode == "single" else dict(os.environ)
    environment = {**OVERSUBSCRIBE, **inherited, **installation.environment, **environment}
    # makes byte code in a repository, which Python would run instead of the source, count as an
    # edit
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    if options.launch.visible_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = options.launch.visible_gpus
    _check_program(command[0], environment["PATH"])
    return subprocess.Popen(
        with_parent_death_signal(command),
        env=environment,
        # Triton's Python models import from the working directory, which may be an untrusted
        # checkpoint
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=(lock,),
        # the umask applies to files of the models; SharedMemory.protect sets the modes of shared
        # memory
        umask=0o077,
    )


def _check_program(program: str, path: str) -> None:
    if shutil.which(program, path=path) is None:
        raise MissingDependencyError(
            f"{program} is not on PATH, but starts engines of several GPUs: run this in NVIDIA's image, or "
            "install Open MPI."
        )


def _choose_ports(server: ServerOptions) -> Ports:
    """Return the server's ports, with a free port in place of each 0.

    Ports of servers that are off stay unchanged.

    Raises:
        InputError: Two servers have the same port.
        ResourceError: A port cannot be used.
    """
    options = server.launch
    addresses = {"grpc": (options.host, options.ports.grpc)}
    if options.http:
        addresses["http"] = (server.http_host, options.ports.http)
    if options.metrics:
        addresses["metrics"] = (options.host, options.ports.metrics)
    fixed = [port for _, port in addresses.values() if port]
    if len(set(fixed)) != len(fixed):
        names = ", ".join(f"{name} {port}" for name, (_, port) in addresses.items())
        raise InputError(f"Two servers have the same port ({names}); give each server a different port.")
    with contextlib.ExitStack() as stack:
        chosen = {name: _reserve(stack, host, name, port) for name, (host, port) in addresses.items()}
    return replace(options.ports, **chosen)


def _reserve(stack: contextlib.ExitStack, host: str, name: str, port: int) -> int:
    """Return `port`, or a free port if `port` is 0.

    The port of `host` is reserved until the stack is closed. `name` is the server's name in the
    message.

    Raises:
        ResourceError: The port cannot be used.
    """
    listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ResourceError(
            f"Port {port} on {host} cannot be used for {name} ({error.strerror}); stop the process that "
            f"listens there, or choose another port with --{name}-port (0 takes any free port)."
        ) from error
    return int(listener.getsockname()[1])
