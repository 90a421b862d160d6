"""Replicas as processes of their own, to be killed, stopped and started again behind one gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmops.errors import ServerError
from tests.support.processes import descendants
from tests.support.stack import READY_SECONDS, Service, process

_POLL = 0.05


class Replica:
    """`llmops serve` on one repository, always on the same port."""

    def __init__(self, repository: Path, folder: Path, exit_timeout: int) -> None:
        self._repository, self._exit_timeout = repository, exit_timeout
        self._log = folder / f"{repository.name}.log"
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{reserved.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns at once; the gateway says when it is ready."""
        ports = ["--grpc-port", self.address.rpartition(":")[2], "--metrics-port", "0"]
        more = ["--exit-timeout", f"{self._exit_timeout}s"]
        command = [sys.executable, "-m", "llmops.cli", "serve", str(self._repository), *ports, *more]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def tell(self, number: signal.Signals) -> None:
        """Signal Triton, the models' processes and what started them, all at once, as when a node is lost."""
        assert self._process is not None
        for pid in descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        self.tell(signal.SIGKILL)
        self.wait()

    def drain(self) -> None:
        """End it as systemd and Kubernetes do: SIGTERM to what started it."""
        assert self._process is not None
        self._process.terminate()

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None
        return self._process.wait(READY_SECONDS)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.tell(signal.SIGCONT)
            self.kill()

    @property
    def log(self) -> str:
        return self._log.read_text()


class Pair:
    """A gateway and its replicas."""

    def __init__(self, front: Service, replicas: list[Replica]) -> None:
        self.url = front.address.removesuffix("/v1")
        self.front, self.replicas = front, replicas

    def states(self) -> dict[str, str]:
        """Return the state of each address as the gateway knows it."""
        return {one["replica"]: one["state"] for one in self._believed()}

    def own(self) -> dict[str, int]:
        """Return the number of the gateway's streams at each address."""
        return {one["replica"]: one["own"] for one in self._believed()}

    def _believed(self) -> list[dict[str, Any]]:
        (gateway,) = _get(f"{self.url}/replicas")["gateways"]
        return [one for some in gateway["models"].values() for one in some]

    async def until(self, holds: Callable[[dict[str, str]], bool]) -> None:
        """Raises ServerError when the states are not as wanted in time."""
        deadline = time.monotonic() + READY_SECONDS
        while not holds(states := await asyncio.to_thread(self.states)):
            if time.monotonic() > deadline:
                raise ServerError(f"the replicas are {states}:\n" + "\n".join(one.log[-2000:] for one in self.replicas))
            await asyncio.sleep(_POLL)

    async def all_ready(self) -> None:
        await self.until(lambda states: list(states.values()) == ["ready"] * len(self.replicas))


@contextlib.contextmanager
def pair(repositories: list[Path], folder: Path, exit_timeout: int = 60, **environment: str) -> Iterator[Pair]:
    """A replica for each repository, started, behind one gateway whose settings `environment` adds to."""
    replicas = [Replica(one, folder, exit_timeout) for one in repositories]
    try:
        for one in replicas:
            one.start()
        for one in replicas:
            _wait_for(one)
        env = {"LLMOPS_REPLICAS": ",".join(one.address for one in replicas), **environment}
        command = [str(Path(sys.executable).parent / "llmops"), "gateway", "--port", "0"]
        with process(command, r"listens on (http://\S+)", env) as (pid, url):
            yield Pair(Service(f"{url}/v1", pid), replicas)
    finally:
        for one in replicas:
            one.close()


def _wait_for(replica: Replica) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not re.search(r"^Ready\. gRPC", replica.log, re.MULTILINE):
        if time.monotonic() > deadline:
            raise ServerError(f"a replica did not come up:\n{replica.log[-2000:]}")
        time.sleep(_POLL)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)
