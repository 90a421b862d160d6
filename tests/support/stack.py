"""The stack under test as separate processes: the real Triton on a repository, and the gateway in front of it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmops.errors import ServerError
from llmops.process import with_parent_death_signal
from tests.support.forked_cli import ForkedProcess
from tests.support.live_process import LLMOPS
from tests.support.processes import descendants

READY_SECONDS = 120.0


@dataclass(frozen=True)
class Service:
    """A running program: its address, and the process whose children belong to it; Triton's `metrics` are a URL."""

    address: str
    pid: int
    metrics: str = ""

    @property
    def pids(self) -> list[int]:
        pids: list[int] = descendants(self.pid)
        return pids

    def metric(self, pattern: str) -> float:
        """Sum of the samples of a gateway's metrics that start with `pattern`, a regular expression."""
        with urllib.request.urlopen(self.address.removesuffix("/v1") + "/metrics", timeout=60) as response:
            page = response.read().decode()
        return sum(float(value) for value in re.findall(rf"^{pattern}.* (\S+)$", page, re.M))


@contextlib.contextmanager
def triton(repository: Path) -> Iterator[Service]:
    """The real tritonserver on `repository`, on free ports, ready. `address` is its gRPC host:port."""
    from llmops.model_repository.launch import Ports, start_triton

    with start_triton(repository, ports=Ports(0, 0, 0), exit_timeout=3, on_log=lambda _: None) as server:
        server.wait_ready(READY_SECONDS)
        yield Service(server.grpc_address, server.pid, server.metrics_url or "")


@contextlib.contextmanager
def engine_on_triton(engine: Path) -> Iterator[Service]:
    """The engine folder in a repository of its own on the real tritonserver, ready."""
    from llmops.model_repository.generate import generate_repository, read_engines

    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder, "repository")
        generate_repository(read_engines([str(engine)]), repository)
        with triton(repository) as server:
            yield server


@contextlib.contextmanager
def gateway(
    triton_address: str, *arguments: str, program: Path | None = None, forked: bool = False
) -> Iterator[Service]:
    """`llmops gateway` in front of Triton on a free port, ready. `address` is the base URL with /v1.

    `program`: the llmops of another environment. `forked`: in a fork of a loaded process, for tests that measure
    nothing.
    """
    start = LLMOPS if forked else [str(program or Path(sys.executable).parent / "llmops")]
    command = [*start, "gateway", "--triton", triton_address, "--port", "0", *arguments]
    with process(command, r"listens on (http://\S+)") as (pid, url):
        wait_ready(f"{url}/health/ready")
        yield Service(f"{url}/v1", pid)


@contextlib.contextmanager
def process(
    command: list[str], address_pattern: str | None, env: dict[str, str] | None = None
) -> Iterator[tuple[int, str]]:
    """Start `command`; yields its pid and what `address_pattern`'s group matched in its output ("" for no pattern).

    The process is ended on leaving.
    """
    environment = {**os.environ, **(env or {})}
    child: subprocess.Popen[bytes] | ForkedProcess
    if tuple(command[: len(LLMOPS)]) == LLMOPS:
        child = ForkedProcess(command[len(LLMOPS) :], environment)
    else:
        child = subprocess.Popen(
            with_parent_death_signal(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    found = _Reader(child, re.compile((address_pattern or "").encode()))
    try:
        yield child.pid, found.wait() if address_pattern else ""
    finally:
        child.terminate()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class _Reader(threading.Thread):
    """Drains a child's output, so that it never blocks on a full pipe, and looks for its address."""

    def __init__(self, child: subprocess.Popen[bytes] | ForkedProcess, pattern: re.Pattern[bytes]) -> None:
        super().__init__(daemon=True)
        self._child, self._pattern = child, pattern
        self._lines: list[bytes] = []
        self._address: str | None = None
        self._event = threading.Event()
        self.start()

    def run(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines = [*self._lines[-20:], line]
            match = self._pattern.search(line)
            if match is not None and self._address is None:
                self._address = match.group(match.re.groups).decode()
                self._event.set()
        self._event.set()

    def wait(self) -> str:
        self._event.wait(READY_SECONDS)
        if self._address is None:
            tail = b"".join(self._lines).decode(errors="replace")
            raise ServerError(f"{self._child.args!r} did not come up:\n{tail}")
        return self._address


def wait_ready(url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ServerError(f"{url} was not ready within {READY_SECONDS:.0f} s")
