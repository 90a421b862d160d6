"""`make bench` on a slow machine: parts get the time their own pace asks for, and what was measured is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmops.perf.lab.benchmarks import engine_path
from llmops.perf.lab.harness.figures import Figure, Section
from llmops.perf.lab.suite import __main__ as suite
from llmops.perf.lab.suite import results
from llmops.perf.lab.suite.page import page, table
from llmops.perf.lab.suite.parts import Part

# the part measures one figure, says that it is half done, and is ended as a limit ends it
CHILD = """
import os, signal, sys
from pathlib import Path
from llmops.perf.lab.benchmarks import engine_path
from llmops.perf.lab.harness.figures import Section, keep
keep(Path(sys.argv[1]))
with Section("Engine path", "command", "text") as section:
    section.add("gateway, 1 streams", 60.0, "tokens/s")
    section.progress(0.5)
    section.add("gateway, 1 streams", 62.0, "tokens/s")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def measure(_: Path) -> Section:
    raise AssertionError("this part runs in a process of its own")


PART = Part("engine path", 100, measure)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    return tmp_path


def test_a_part_that_is_ended_keeps_what_it_measured(folder):
    ended = subprocess.run([sys.executable, "-c", CHILD, str(results.path(PART))], check=False, capture_output=True)
    assert ended.returncode < 0, ended.stderr
    suite._cut(PART, 100.0)
    kept = results.section(PART)
    assert kept is not None
    assert [(figure.name, figure.value) for figure in kept.figures] == [("gateway, 1 streams", 62.0)]
    assert results.missing(PART) is None
    text = page([PART])
    assert "| gateway, 1 streams: 62 tokens/s<br>not everything was measured: it was not done after 100 s" in text


def test_a_page_keeps_what_parts_said_that_did_not_run_here(folder):
    """As in a fresh clone, where only one part is run."""
    other, third = Part("door", 60, measure), Part("full soak", 600, measure)
    for part, title, value in ((PART, "Engine path", 60.0), (other, "What a store costs", 7.0)):
        section = Section(title, "command", "text", when="2026-01-01 10:00", where=f"64 cores of {title}")
        section.figures.append(Figure("cost", value, "us", 5.0))
        section.write_json(results.path(part))
    earlier = page([PART, other, third])
    results.forget(PART)
    Section("What a store costs", "command", "text", figures=[Figure("cost", 4.0, "us", 5.0)]).write_json(
        results.path(other)
    )
    text = page([PART, other, third], earlier)
    assert "Engine path | cost: 60 us **(≤ 5: missed)** | `command` |" in text
    assert "2026-01-01 10:00 UTC, 64 cores of Engine path |" in text
    assert "7 us" not in text, "what ran now takes the place of what it said before"
    assert "What a store costs | cost: 4 us (≤ 5) |" in text
    assert text.count("What a store costs") == 1
    assert "full soak: did not run (was not run)" in text
    assert page([PART, other, third], text) == text


def test_the_table_has_all_figures_and_keeps_those_of_parts_that_did_not_run_here(folder):
    section = Section("Engine path", "command", "text", when="2026-01-01 10:00")
    section.figures += [Figure("cost", 60.0, "us", 5.0), Figure("compared, by others", 61.5, "us")]
    section.write_json(results.path(PART))
    assert "compared" not in page([PART])
    rows = [
        "Engine path,cost,60.0,us,≤ 5,2026-01-01 10:00",
        'Engine path,"compared, by others",61.5,us,,2026-01-01 10:00',
    ]
    first = table([PART])
    assert first.splitlines() == ["section,figure,value,unit,aim,measured", *rows]
    section.title = "What a store costs"
    section.write_json(results.path(PART))
    assert table([PART], first).splitlines()[1:] == [
        *rows,
        *(row.replace("Engine path", section.title) for row in rows),
    ]


def test_a_part_that_is_ended_before_its_first_figure_is_missing(folder):
    suite._cut(PART, 100.0)
    assert results.section(PART) is None
    assert results.missing(PART) == "it was not done after 100 s"


@pytest.mark.parametrize(
    ("seconds", "done", "allowed"),
    [
        (40.0, 0.5, 120.0),  # 80 s at this pace, and half as much again
        (30.0, 0.9, 100.0),  # faster than the limit: the limit stays
        (90.0, 0.0, 100.0),  # no sign of progress
        (99.0, 0.05, 500.0),  # five times the limit at most: it may as well hang
    ],
)
def test_a_limit_follows_the_pace_of_the_first_round(folder, seconds, done, allowed):
    Section("Engine path", "command", "text", seconds=seconds, done=done).write_json(results.path(PART))
    assert results.allowance(PART, 100.0) == pytest.approx(allowed)


def test_a_part_without_progress_is_ended_at_its_limit(folder):
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, text=True)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            suite._wait(process, PART, 0.01)
    finally:
        process.kill()
        process.communicate()


def test_the_engine_path_says_how_far_it_is_from_its_first_measurement_on():
    """Two systems: the pace is known after the first warm-up, and a figure after its first round."""
    section, seen = Section("Engine path", "command", "text"), []

    def measure(streams: int, requests: int) -> float:
        seen.append((section.done, [figure.name for figure in section.figures]))
        return 100.0

    engine_path.compare({"bare pipeline": measure, "gateway": measure}, section)
    shares = [done for done, _ in seen]
    assert shares[0] == 0.0
    assert 0 < shares[1] < 0.1
    assert shares == sorted(set(shares))
    assert section.done == pytest.approx(engine_path.COMPARING)
    assert "gateway, 1 streams" in seen[4][1]
    assert [figure.name for figure in section.figures].count("gateway, 32 streams") == 1
