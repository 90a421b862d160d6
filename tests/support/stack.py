"""The stack under test as separate processes: the real Triton on a repository, and the gateway in front of it."""

import contextlib
import re
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmops.model_repository.launch import Ports, TritonServer, start_triton
from tests.support.live_process import LLMOPS, LiveProcess
from tests.support.processes import descendants
from tests.support.waiting import wait_until

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
def ready_triton(repository: Path, **options: Any) -> Iterator[TritonServer]:
    """The real tritonserver on `repository`, on free ports, ready; `options` are those of `start_triton`."""
    with start_triton(repository, ports=Ports(0, 0, 0), **options) as server:
        server.wait_ready(READY_SECONDS)
        yield server


@contextlib.contextmanager
def triton(repository: Path) -> Iterator[Service]:
    """A `ready_triton`, quiet. `address` is its gRPC host:port."""
    with ready_triton(repository, exit_timeout=3, on_log=lambda _: None) as server:
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
    with tempfile.NamedTemporaryFile() as log:
        child = LiveProcess(command, Path(log.name), env)
        try:
            yield child.pid, child.found(address_pattern) if address_pattern else ""
        finally:
            child.stop()


def wait_ready(url: str) -> None:
    """Wait until `url` answers with 200."""

    def ready() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as response:
            return bool(response.status == 200)
        return False

    wait_until(ready, url)
