"""A pytest plugin: the run fails if the event loop of a gateway was held for more than 250 ms.

Every gateway that the tests start appends what held its loop to the file that LLMOPS_LAG_REPORT names.
`LLMOPS_LAG=report` only prints it: on a machine that others use too, their work may be what held a loop.
"""

import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

#: The longest that a loop may be held, in seconds.
MAX_LAG = 0.25


def report_folder() -> Path:
    """Return the folder of this run's reports, which all workers share."""
    return Path(os.environ["LLMOPS_LAG_REPORT"]).parent


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ["LLMOPS_LAG_REPORT"] = str(Path(tempfile.mkdtemp(prefix="llmops-lag-")) / "report")
    _note_collection(0.0)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(report_folder(), ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def calm_garbage_collector() -> Iterator[None]:
    """Collect garbage as rarely as a gateway's own process does, and note the longest collection.

    A test's process grows by gigabytes of other tests, so that its collections say nothing about the gateway.
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
    _note_collection(longest)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    judged = os.environ.get("LLMOPS_LAG") != "report" and not hasattr(session.config, "workerinput")
    if judged and _lags():
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _lags():
        stage = line["stage"] or "something that is not the gateway's own code"
        terminalreporter.write_line(f"LAG: an event loop was held for {line['held']:.3f} s by {stage}")


def _note_collection(seconds: float) -> None:
    with open(report_folder() / "pytest", "a") as processes:
        processes.write(f"{os.getpid()} {seconds}\n")


def _lags() -> list[dict]:
    """Return the lags above the limit.

    In a test's own process, lag outside the gateway's functions is the test's work, and garbage collections are not
    counted.
    """
    report = report_folder() / "report"
    if not report.exists():
        return []
    rows = (line.split() for line in (report_folder() / "pytest").read_text().splitlines())
    collecting = {int(pid): float(seconds) for pid, seconds in rows}
    found = []
    for line in map(json.loads, report.read_text().splitlines()):
        if line["pid"] in collecting:
            line["held"] -= collecting[line["pid"]] if line["stage"] else line["held"]
        if line["held"] > MAX_LAG:
            found.append(line)
    return found
