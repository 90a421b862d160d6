"""Support for attacks: a gateway in a process of its own, raw connections to it, and what an attack costs it.

An attack is scaled to a few seconds in `make test` and runs at full size in `make attacks`
(`LLMOPS_ATTACKS=full`). Bounds are the same at both sizes unless a test says otherwise.
"""

import contextlib
import json
import math
import os
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import yaml

from tests.support.live_process import LLMOPS, LiveProcess
from tests.support.waiting import GENEROUS, wait_until

T = TypeVar("T")

FULL = os.environ.get("LLMOPS_ATTACKS") == "full"

MIB = 2**20
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


def scaled(small: T, full: T) -> T:
    """Return the size of an attack: `small` in `make test`, `full` in `make attacks`."""
    return full if FULL else small


class Gateway(LiveProcess):
    """`llmops gateway` with `settings`, listening on a free port."""

    def __init__(self, folder: Path, triton: str, **settings: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "gateway.yaml"
        config.write_text(yaml.safe_dump({"triton": triton, "port": 0, **settings}))
        super().__init__([*LLMOPS, "gateway", "--config", str(config)], folder / "gateway.log")
        self.url = self.found(r"listens on (http://\S+)")
        parts = urlsplit(self.url)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)

    def ready(self) -> None:
        """Wait until a model is ready."""
        wait_until(lambda: status(self, b"GET /health/ready HTTP/1.1\r\nhost: x\r\n\r\n") == 200, "a ready gateway")

    def metric(self, pattern: str) -> float:
        """Return the sum of the samples whose lines start with `pattern`, a regular expression."""
        page = exchange(self, b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").decode()
        return sum(float(value) for value in re.findall(rf"^{pattern}.* (\S+)\r?$", page, re.M))


class Engine(LiveProcess):
    """A scripted Triton in a process of its own, whose model `tiny` answers each request with the same tokens."""

    def __init__(self, folder: Path, card: dict[str, object], tokens: int = 4, seconds_per_token: float = 0.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "card.json").write_text(json.dumps(card))
        given = [str(folder / "card.json"), str(tokens), str(seconds_per_token)]
        super().__init__([sys.executable, "-m", "tests.attacks.scripted_engine", *given], folder / "engine.log")
        self.address = "127.0.0.1:" + self.found(r"listens on (\d+)")

    @property
    def requests(self) -> int:
        """Return the number of requests that have reached the engine."""
        return self.log.count("request\n")


def connect(gateway: Gateway, source: str = "127.0.0.1", receive_buffer: int = 0) -> socket.socket:
    """Open a connection to the gateway from the loopback address `source`.

    `receive_buffer` bounds what the system takes for a client that does not read, in bytes; 0 for its default.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(GENEROUS)
    made.bind((source, 0))
    made.connect((gateway.host, gateway.port))
    return made


def posted(path: str, body: object, headers: bytes = b"") -> bytes:
    """Return a request with this JSON, and with `headers`, each with its end of line."""
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (path.encode(), headers, len(data), data)


def exchange(gateway: Gateway, sent: bytes, source: str = "127.0.0.1") -> bytes:
    """Send bytes and return everything that comes back until the gateway closes, or resets, the connection."""
    received = b""
    with connect(gateway, source) as made, contextlib.suppress(ConnectionError):
        made.sendall(sent)
        while part := made.recv(65536):
            received += part
    return received


def status(gateway: Gateway, sent: bytes, source: str = "127.0.0.1") -> int:
    """Send one request and return the status of its answer, or 0 if the connection ended without one."""
    with contextlib.suppress(OSError), connect(gateway, source) as made:
        made.sendall(sent)
        head = made.recv(4096)
        if head.startswith(b"HTTP/1.1 "):
            return int(head.split()[1])
    return 0


class Neighbour(threading.Thread):
    """A client that sends one request after the other and notes how long each took.

    Each request has a connection of its own, as that of a client that has just arrived. At the end, none may have
    failed, and 95 of 100 must have taken less than `p95` seconds.
    """

    def __init__(self, gateway: Gateway, sent: bytes = LIVE, p95: float = math.inf) -> None:
        super().__init__(daemon=True)
        self._gateway, self._sent, self._p95 = gateway, sent, p95
        self._over = threading.Event()
        self.seconds: list[float] = []
        self.failures = 0

    def run(self) -> None:
        while not self._over.wait(0.02):
            start = time.perf_counter()
            if status(self._gateway, self._sent, "127.0.0.99") == 200:
                self.seconds.append(time.perf_counter() - start)
            else:
                self.failures += 1

    def __enter__(self) -> "Neighbour":
        self.start()
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        wait_until(lambda: len(self.seconds) + self.failures > 9, "ten requests of a neighbour")
        self._over.set()
        self.join()
        assert self.seconds, f"no request was answered, {self.failures} failed"
        p95 = sorted(self.seconds)[int(len(self.seconds) * 0.95)]
        record(f"{len(self.seconds)} of others answered with a p95 of {p95 * 1e3:.0f} ms, {self.failures} failed")
        if failed is None:
            assert (self.failures, p95 < self._p95) == (0, True)


@contextlib.contextmanager
def max_cost(mebibytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Fail if a block takes this much memory of this process, or this long by `clock`."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, clock()
    yield
    took, grown = clock() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    record(f"{grown:.0f} MiB, {took:.2f} s")
    assert (grown < mebibytes, took < seconds) == (True, True)


@contextlib.contextmanager
def max_growth(process: LiveProcess, limit: float) -> Iterator[None]:
    """Fail if a program grows by `limit` bytes during a block."""
    before = process.memory()
    yield
    grown = process.peak() - before
    record(f"{grown / MIB:.1f} MiB grown")
    assert grown < limit


def record(measured: str) -> None:
    """Print a measured figure, for docs/security.md: `make attacks` shows it."""
    print(f"measured: {os.environ.get('PYTEST_CURRENT_TEST', '').split(' ')[0]}: {measured}", file=sys.stderr)
