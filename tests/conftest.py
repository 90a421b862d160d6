"""Fixtures that several areas share: a real engine, a model repository and the real Triton server on it.

`LLMOPS_TEST_ENGINE` names an engine folder to use instead of building one.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def engine_dir() -> Path:
    """SmolLM2-135M-Instruct for OpenVINO in float32, built once per checkout into .cache/test-engines."""
    given = os.environ.get("LLMOPS_TEST_ENGINE")
    if given:
        return Path(given)
    pytest.importorskip("openvino_genai")
    from llmops.build.engine import build
    from llmops.build.spec import BuildSpec

    output = ROOT / ".cache" / "test-engines" / "smollm2-none"
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output.parent / "smollm2-none.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(BuildSpec(checkpoint="smollm2", output=output, name="smollm2", max_batch_size=64))
    return output


@pytest.fixture(scope="session")
def repository(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository that serves the engine as `smollm2`."""
    from llmops.model_repository.generate import generate_repository, read_engines

    output = tmp_path_factory.mktemp("triton") / "repository"
    generate_repository(read_engines([f"smollm2={engine_dir}"]), output)
    return output


@pytest.fixture(scope="session")
def triton(repository: Path) -> Iterator[object]:
    """The real Triton server, ready, on free ports: `.grpc_address`, `.http_url`, `.metrics_url`, `.ports`, `.pid`.

    Shared by the tests of one process: put them into one group with `pytest.mark.xdist_group("stack")`.
    """
    from llmops.model_repository.launch import Ports, start_triton

    with start_triton(repository, ports=Ports(0, 0, 0), http=True) as server:
        server.wait_ready(timeout=120)
        yield server


def pytest_configure(config: pytest.Config) -> None:
    """Every gateway that the suite starts notes here what held its event loop for more than 250 ms."""
    if not hasattr(config, "workerinput"):
        os.environ["LLMOPS_LAG_REPORT"] = str(Path(tempfile.mkdtemp(prefix="llmops-lag-")) / "report")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if not hasattr(session.config, "workerinput") and _held():
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _held():
        terminalreporter.write_line(f"FAILED: an event loop was held for {line['held']:.3f} s by {line['stage']}")


def _held() -> list[dict]:
    report = Path(os.environ["LLMOPS_LAG_REPORT"])
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
