"""Gateways as processes of their own, to be killed, stopped and cut off."""

import time

import pytest

from tests.support.live_process import LLMOPS, LiveProcess
from tests.support.mock_engine.repository import make_mock_engine
from tests.support.model_code import put_on_path
from tests.support.stack import ready_triton, wait_ready

put_on_path("tensorrt_llm")


class Gateway(LiveProcess):
    """`llmops gateway` as its own process, as users run it, ready."""

    def __init__(self, triton: str, tmp_path, **environment: str) -> None:
        log = tmp_path / f"gateway-{time.monotonic_ns()}.log"
        super().__init__([*LLMOPS, "gateway", "--triton", triton, "--port", "0"], log, environment)
        self.url = self.found(r"listens on (http://\S+)")
        wait_ready(f"{self.url}/health/ready")


@pytest.fixture(scope="session")
def mock_triton(engine_dir, tmp_path_factory):
    """A Triton with two models: each stream of `mock` gets a token a millisecond, each of `paced` one in 20."""
    repository = tmp_path_factory.mktemp("mock") / "repository"
    make_mock_engine(engine_dir, repository, 0.001, names=("mock", "paced"), slow={"paced": 20})
    with ready_triton(repository, exit_timeout=3) as server:
        yield server


@pytest.fixture
def start_gateway(tmp_path):
    started: list[Gateway] = []

    def start(address: str, **environment: str) -> Gateway:
        started.append(Gateway(address, tmp_path, **environment))
        return started[-1]

    yield start
    for gateway in started:
        gateway.kill()
