"""Gateways as processes of their own, to be killed, stopped and cut off."""

from __future__ import annotations

import time

import pytest

from tests.support.live_process import LLMOPS, LiveProcess
from tests.support.stack import wait_ready


class Gateway(LiveProcess):
    """`llmops gateway` as its own process, as users run it, ready."""

    def __init__(self, triton: str, tmp_path, **environment: str) -> None:
        log = tmp_path / f"gateway-{time.monotonic_ns()}.log"
        super().__init__([*LLMOPS, "gateway", "--triton", triton, "--port", "0"], log, environment)
        self.url = self.found(r"listens on (http://\S+)")
        wait_ready(f"{self.url}/health/ready")

    def close(self) -> None:
        self.kill()


@pytest.fixture
def start_gateway(tmp_path):
    started: list[Gateway] = []

    def start(address: str, **environment: str) -> Gateway:
        started.append(Gateway(address, tmp_path, **environment))
        return started[-1]

    yield start
    for gateway in started:
        gateway.close()
