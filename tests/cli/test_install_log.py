"""Tests that `make serve` shows an installation's output only if the installation fails."""

import subprocess
from pathlib import Path

QUIETLY = Path(__file__).parents[2] / ".ci" / "quietly"


def run(log: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([QUIETLY, log, "sh", "-c", script], capture_output=True, text=True)


def test_warnings_are_in_the_log_alone(tmp_path: Path) -> None:
    done = run(tmp_path / "log", "echo WARNING: a page of it >&2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "log").read_text() == "WARNING: a page of it\n"


def test_a_failure_names_the_log_and_shows_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = run(log, "seq 40; echo ERROR: no such package >&2; exit 3")
    assert (done.returncode, done.stdout) == (3, "")
    assert f"The whole log is {log}" in done.stderr
    assert done.stderr.endswith("39\n40\nERROR: no such package\n")
    assert "\n20\n" not in done.stderr
    assert len(log.read_text().splitlines()) == 41
