"""Fixtures that several areas share: a real engine, a model repository and the real Triton server on it.

`LLMOPS_TEST_ENGINE` names an engine folder to use instead of building one.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import hypothesis
import pytest
import setuptools  # noqa: F401  before anything else can bring distutils in: torch asks for setuptools' own

from llmops.gateway.logging_setup import REQUEST_LINES
from tests.support.engines import smollm2_engine

# Images of Python often forbid bytecode files. Each of the programs that a run starts would then
# compile all that it imports, and each worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts jobs in the background with SIGINT ignored, and programs inherit that. Tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.support.event_loop_lag", "tests.support.worker_restarts", "tests.support.quick_gateways"]

# Hypothesis's deadline per example is a clock's judgement, which a machine with other work fails. A third of its
# examples find what they find: each run draws others.
if hypothesis.settings.get_current_profile_name() == "default":
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("untimed", deadline=None, max_examples=30, suppress_health_check=slow)
    hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def log_lines() -> None:
    """Let each test log all kinds of lines: the test before it may have logged the same less than a second ago."""
    REQUEST_LINES._last.clear()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undo what a test changed in the environment: a variable that is left changes the tests after it."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def engine_dir() -> Path:
    """SmolLM2-135M-Instruct for OpenVINO in float32, built once per checkout into .cache/test-engines."""
    if given := os.environ.get("LLMOPS_TEST_ENGINE"):
        return Path(given)
    pytest.importorskip("openvino_genai")
    return smollm2_engine()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that expects some bytes and not others, with a chat template."""
    pytest.importorskip("torch")
    from tests.support.tiny_models import TEMPLATE, write_checkpoint

    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", fitted=True, max_position_embeddings=8192)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OpenVINO engine of that model, named `tiny`: a token takes a hundredth of SmolLM2's time."""
    pytest.importorskip("openvino_genai")
    from llmops.build.job.build_engine import build
    from llmops.build.spec import BuildSpec

    output = tmp_path_factory.mktemp("tiny-engine") / "tiny"
    build(BuildSpec(str(tiny_checkpoint), output, name="tiny", max_batch_size=8, max_num_tokens=256))
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

    Shared by the tests of one process: put them into one group with `pytest.mark.xdist_group("stack")`. Tests that
    start other Tritons are a group of their own, `own-triton`, which another worker runs meanwhile.
    """
    from tests.support.stack import ready_triton

    with ready_triton(repository, http=True) as server:
        yield server


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start a Triton that died again for the next test, with all session fixtures that depend on it."""
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    for fixture in known.get("triton", ()):
        process = getattr(fixture.cached_result[0], "process", None) if fixture.cached_result else None
        if process is not None and process.poll() is not None:
            fixture.finish(item._request)


#: Folders that one worker runs: each loads or starts what takes seconds, such as torch or PostgreSQL.
FOLDER_GROUPS = {"build": "torch", "embeddings": "torch", "quantize": "torch", "trtllm": "torch", "store": "store"}
#: The groups that take minutes begin first, so that small ones fill the workers in the end.
LONGEST_GROUPS = ["clients", "stack", "own-triton", "torch", "gateway/test_usage_chaos", "interrupted"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one worker, and mark those of both Triton groups (`make quick`: `-m "not stack"`).

    Tests that are in no group share one with their file, whose fixtures are then made once and not in each worker.
    """
    for item in items:
        groups = [mark.args[0] for mark in item.iter_markers("xdist_group")]
        if not groups:
            folder, *more = item.path.relative_to(Path(__file__).parent).with_suffix("").parts
            groups = [FOLDER_GROUPS.get(folder, "/".join([folder, *more]))]
            item.add_marker(pytest.mark.xdist_group(groups[0]))
        if {"stack", "own-triton"} & {*groups}:
            item.add_marker("stack")
    places = {group: place for place, group in enumerate(LONGEST_GROUPS)}
    items.sort(key=lambda item: min(places.get(mark.args[0], 99) for mark in item.iter_markers("xdist_group")))


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment for a machine with other work. Workers, and what they start, inherit it."""
    workers = config.getoption("numprocesses", None) or 1
    # OpenMP's threads wait for each other busily, which takes ten times as long on two busy processors
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # a Triton on a machine that stands still for a while is not away
    os.environ.setdefault("LLMOPS_TIMEOUTS__CONNECT", "60s")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show each test that failed at first and passed when it ran again."""
    for report in terminalreporter.getreports("rerun"):
        lines = report.longreprtext.splitlines()
        reason = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])
        terminalreporter.write_line(f"TWICE: {report.nodeid} failed at first: {reason}")
