"""Gateways as processes of their own, to be killed, stopped and cut off."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest


class Gateway:
    """`llmops gateway` as its own process, as users run it."""

    def __init__(self, triton: str, tmp_path, **environment: str) -> None:
        self.log = tmp_path / f"gateway-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "llmops.cli", "gateway", "--triton", triton, "--port", "0"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )
        self.url = self._wait()

    def _wait(self) -> str:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            found = re.search(r"listens on (http://\S+)", self.log.read_text())
            if found:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(found[1] + "/health/ready", timeout=60).close()
                    return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise TimeoutError(self.log.read_text())

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
        self.process.wait()


@pytest.fixture
def start_gateway(tmp_path):
    started: list[Gateway] = []

    def start(address: str, **environment: str) -> Gateway:
        started.append(Gateway(address, tmp_path, **environment))
        return started[-1]

    yield start
    for gateway in started:
        gateway.close()
