"""Fixtures that several areas share: a real engine, a model repository and the real Triton server on it.

`LLMOPS_TEST_ENGINE` names an engine folder to use instead of building one.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import setuptools  # noqa: F401  before anything else can bring distutils in: torch asks for setuptools' own
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

from tests.support.engines import smollm2_engine

# its 200 ms per example, and what it calls slow to draw, are a clock's judgement, and the machine has others to serve
if hypothesis.settings.get_current_profile_name() == "default":
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("untimed")

ROOT = Path(__file__).parents[1]
STOLEN = pytest.StashKey["StolenTime"]()


@pytest.fixture(scope="session")
def engine_dir() -> Path:
    """SmolLM2-135M-Instruct for OpenVINO in float32, built once per checkout into .cache/test-engines."""
    given = os.environ.get("LLMOPS_TEST_ENGINE")
    if given:
        return Path(given)
    pytest.importorskip("openvino_genai")
    return smollm2_engine()


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


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A Triton that died is started again for the next test, with all that a session has built upon it."""
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    for fixture in known.get("triton", ()):
        process = getattr(fixture.cached_result[0], "process", None) if fixture.cached_result else None
        if process is not None and process.poll() is not None:
            fixture.finish(item._request)


class StolenTime:
    """Seconds of CPU that the machine's host gave to others (`steal` of /proc/stat), noted ten times a second.

    They pass inside a process as if it had worked.
    """

    def __init__(self) -> None:
        self._notes = [(time.time(), self._read())]
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def between(self, start: float, end: float) -> float:
        before = [stolen for when, stolen in self._notes if when <= start] or [self._notes[0][1]]
        after = [stolen for when, stolen in self._notes if when >= end] or [self._read()]
        return after[0] - before[-1]

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self._notes.append((time.time(), self._read()))

    def _read(self) -> float:
        with open("/proc/stat") as stat:
            return int(stat.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def _expect_a_busy_machine(workers: int) -> None:
    """Workers inherit it, and what they start."""
    # OpenMP's threads wait for each other busily: where two processors have other work too, that took ten times as long
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # a Triton whose machine stands still for a while is not away
    os.environ.setdefault("LLMOPS_TIMEOUTS__CONNECT", "60s")


def pytest_configure(config: pytest.Config) -> None:
    """Every gateway that the suite starts notes here what held its event loop for more than 250 ms."""
    _expect_a_busy_machine(config.getoption("numprocesses", None) or 1)
    if not hasattr(config, "workerinput"):
        os.environ["LLMOPS_LAG_REPORT"] = str(Path(tempfile.mkdtemp(prefix="llmops-lag-")) / "report")
        config.stash[STOLEN] = StolenTime()
    with open(_report().with_name("pytest"), "a") as processes:
        processes.write(f"{os.getpid()} 0\n")


@pytest.fixture(scope="session", autouse=True)
def calm_garbage_collector() -> Iterator[None]:
    """As in a gateway's own process: what the suite has imported is not to be looked through in a test's event loop.

    A test's process goes on growing by gigabytes of other tests, though, so its longest collection is noted as well.
    """
    begun = longest = 0.0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal begun, longest
        if phase == "start":
            begun = time.perf_counter()
        else:
            longest = max(longest, time.perf_counter() - begun)

    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.callbacks.append(watch)
    yield
    gc.callbacks.remove(watch)
    with open(_report().with_name("pytest"), "a") as processes:
        processes.write(f"{os.getpid()} {longest}\n")


class Replacing(LoadGroupScheduling):
    """Goes on when a worker dies, where xdist 3.8 waits for good.

    A worker begins a test when it has the next one, or knows that there is none.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """What the dead one has done is no work: handed on it would be pieces without a test."""
        pieces = self.assigned_work[node].items()
        self.assigned_work[node] = {scope: tests for scope, tests in pieces if not all(tests.values())}
        return super().remove_node(node)

    def mark_test_pending(self, item: str) -> None:
        """`remove_node` has put it back."""

    def schedule(self) -> None:
        """One that takes a dead one's place gets two pieces, as all others did at the start."""
        begun = self.collection is not None
        super().schedule()
        if begun:
            super().schedule()

    def _reschedule(self, node: WorkerController) -> None:
        """Not yet to one that is still collecting."""
        if node in self.registered_collections:
            super()._reschedule(node)


def pytest_sessionstart(session: pytest.Session) -> None:
    """A worker that dies writes down where its threads were: to a file, as its output scrolls away."""
    if hasattr(session.config, "workerinput"):
        faulthandler.enable(_report().with_name(f"died-{os.getpid()}").open("w"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Replacing | None:
    return Replacing(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """`LLMOPS_LAG=report` only prints: on a machine that others use too, what held a loop may be their work."""
    judged = os.environ.get("LLMOPS_LAG") != "report"
    if judged and not hasattr(session.config, "workerinput") and _held(session.config):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in _held(config):
        stage = line["stage"] or "something that is not the gateway's own code"
        terminalreporter.write_line(f"LAG: an event loop was held for {line['held']:.3f} s by {stage}")
    for report in terminalreporter.getreports("rerun"):
        lines = report.longreprtext.splitlines()
        said = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])
        terminalreporter.write_line(f"TWICE: {report.nodeid} failed at first: {said}")
    for died in _report().parent.glob("died-*"):
        # the thread whose fault it was, innermost first; the others' stacks fill pages
        why, *stacks = died.read_text().split("\n\n")
        for stack in stacks:
            if stack.startswith("Current thread"):
                terminalreporter.write_line("\n".join([why, *stack.splitlines()[:20]]))


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.stash[STOLEN].close()
        shutil.rmtree(_report().parent, ignore_errors=True)


def _report() -> Path:
    return Path(os.environ["LLMOPS_LAG_REPORT"])


def _held(config: pytest.Config) -> list[dict]:
    """In a test's own process, what is none of the gateway's functions is the test's work, and collections of garbage
    are of what all tests left."""
    if not _report().exists():
        return []
    rows = (line.split() for line in _report().with_name("pytest").read_text().splitlines())
    collecting = {int(pid): float(seconds) for pid, seconds in rows}
    found = []
    for line in map(json.loads, _report().read_text().splitlines()):
        line["held"] -= config.stash[STOLEN].between(line["at"] - line["of"], line["at"])
        if line["pid"] in collecting:
            line["held"] -= collecting[line["pid"]] if line["stage"] else line["held"]
        if line["held"] > 0.25:
            found.append(line)
    return found
