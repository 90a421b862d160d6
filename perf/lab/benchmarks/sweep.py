"""The highest rate that holds an objective, embedded engine: `python -m llmops.perf.lab.benchmarks.sweep ENGINE`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmops.perf.lab.benchmarks.engine_path import served
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.load import run
from llmops.perf.lab.harness.script import script
from llmops.perf.load.objectives import parse_objective
from llmops.perf.report.summary import Summary

SLOS = ("ttft:500ms", "tpot:100ms")
SHARE = 0.95
STEP_SECONDS = 6.0
TOKENS = 32


def measure(engine: Path) -> Section:
    """The rate, and what the answers were like at it."""
    command = (
        f"llmops bench URL --sweep -o {TOKENS} -d {STEP_SECONDS:g}s --slo {' --slo '.join(SLOS)} --fail-under {SHARE}"
    )
    text = f"The embedded engine, 64 tokens in, {TOKENS} out, Poisson arrivals, {STEP_SECONDS:g} s a step."
    section = Section("Highest rate within an objective", command, text)
    slos = [parse_objective(text) for text in SLOS]
    with section, served(engine) as (_, front):
        run(front.address, output=TOKENS, concurrency=4, requests=8)
        load: dict[str, Any] = {"sweep": True, "slos": slos, "slo_share": SHARE, "duration": STEP_SECONDS, "rate": 4.0}
        document = run(front.address, output=TOKENS, **load)
        best = max((step.rate for step in document.sweep if step.holds), default=0.0)
        section.add(f"highest rate with {SHARE:.0%} of requests within {', '.join(SLOS)}", best, "requests/s")
        _at(document.summary, section)
        section.note(f"Tried: {', '.join(f'{step.rate:g}' for step in document.sweep)} requests/s.")
    return section


def _at(summary: Summary, section: Section) -> None:
    for name in ("ttft", "tpot"):
        distribution = getattr(summary, name)
        section.add(f"{name} p50 at that rate", distribution.p50, "ms")
        section.add(f"{name} p95 at that rate", distribution.p95, "ms")
    section.add("output tokens/s at that rate", summary.output_tokens_per_second, "tokens/s")


if __name__ == "__main__":
    script(measure, "ENGINE", "Sweep the gateway in front of ENGINE.")()
