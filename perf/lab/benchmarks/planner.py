"""How accurate the planner is and how long it takes, as a section of docs/performance.md.

`python -m llmops.perf.lab.benchmarks.planner`; plan_accuracy prints the same row by row.
"""

from __future__ import annotations

from statistics import median

from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.timing.timing_source import timing_source
from llmops.perf.lab.benchmarks.plan_accuracy import Row, predict, published
from llmops.perf.lab.benchmarks.plan_speed import KINDS, seconds
from llmops.perf.lab.harness.figures import Section

# %, median and worst
AIMS, GPT_OSS_AIMS = (10.0, 20.0), (15.0, 35.0)
SPEED_AIM = 10.0  # s
MODEL = "mixtral-8x22b"


def measure() -> Section:
    """All figures of this script."""
    text = "`llmops plan` against the throughput that NVIDIA published for TensorRT-LLM; nothing runs on a GPU here."
    section = Section("Planner", "python -m llmops.perf.lab.benchmarks.planner", text)
    with section:
        times = {row.gpu: timing_source(find_gpu(row.gpu)) for row in published()}
        rows = [predict(row, times[row.gpu]) for row in published()]
        for group in dict.fromkeys(row.group for row in rows):
            _errors(group, [row for row in rows if row.group == group], section)
        for label in sorted({source.label for source in times.values()}):
            section.note(f"Times from {label}.")
        section.add(f"search over 1 kind of GPU, {MODEL}", seconds(MODEL, KINDS[:1])[0], "s")
        section.add(f"search over {len(KINDS)} kinds, {MODEL}", seconds(MODEL, KINDS)[0], "s", SPEED_AIM)
    return section


def _errors(group: str, rows: list[Row], section: Section) -> None:
    errors = [100 * abs(row.error) for row in rows]
    aims = GPT_OSS_AIMS if group == "GPT-OSS" else AIMS
    section.add(f"{group}: median error of {len(rows)} rows", median(errors), "%", aims[0])
    section.add(f"{group}: worst error", max(errors), "%", aims[1])


if __name__ == "__main__":
    measure()
