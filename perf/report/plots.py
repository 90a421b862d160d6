"""The plots of a run's report."""

import math
import re
from collections import Counter
from itertools import pairwise
from typing import Any

from llmops.html_pages.plots import Plot, Points, Series
from llmops.perf.load.objectives import meets_objectives, parse_objective
from llmops.perf.records import Record, percentile
from llmops.perf.report.document import Document
from llmops.units import parse_duration


def plots(document: Document) -> list[Plot]:
    """Return the plots of a run.

    All runs have distributions of latencies and a timeline, and a sweep has latencies by rate.
    """
    records = [r for r in document.records if r["error"] is None and not r["cancelled"]]
    found = []
    for name, of, values in (
        ("TTFT", "requests", [r["first"] - r["start"] for r in records if r["first"] is not None]),
        ("ITL", "gaps", [b - a for r in records for a, b in pairwise(r["chunks"])]),
        ("E2E", "requests", [r["end"] - r["start"] for r in records]),
    ):
        if values:
            points = cumulative([1000 * value for value in values])
            found.append(_distribution(name, of, points, document))
    return [*_sweep(document), *found, *_attained(document), *_over_time(document.records)]


def _attained(document: Document) -> list[Plot]:
    """Return a plot of the share of requests that met the objectives over time.

    Long runs have one point per minute.
    """
    slos = [parse_objective(text) for text in document.options.get("slos", ())]
    if not slos or not document.records:
        return []
    width = max(max(r["start"] for r in document.records) / 60, 1.0)
    width = 60.0 if width > 1.0 else width
    bins: dict[int, list[bool]] = {}
    for row in document.records:
        if not row["cancelled"]:
            bins.setdefault(int(row["start"] / width), []).append(meets_objectives(Record(**row), slos))
    points = [(width * (at + 0.5), 100 * sum(good) / len(good)) for at, good in sorted(bins.items())]
    series, marks = Series("good, %", points), [(at, label) for at, label in document.options.get("events", ())]
    return [Plot("Requests within the objectives", "s since start", "%", [series], 100, marks)]


def _distribution(name: str, of: str, points: Points, document: Document) -> Plot:
    """Return a plot of the cumulative distribution of a latency.

    Lines mark the percentiles and the objective.
    """
    values = [value for value, _ in points]
    marks = [(percentile(values, p), f"p{p}") for p in (50, 95, 99)]
    marks += [
        (1000 * parse_duration(slo.split(":")[1]), "SLO")
        for slo in document.options.get("slos", ())
        if _is_of(slo, name)
    ]
    series = [Series(f"% of {of}", [(value, round(100 * share, 2)) for value, share in points])]
    return Plot(f"{name}: share of {of} that took at most this time", "ms", f"% of {of}", series, 100, marks)


def _is_of(slo: str, name: str) -> bool:
    # The objective itl limits the longest gap of a request, so it is not drawn over single gaps.
    return re.split("[_:]", slo)[0] == name.lower() and name != "ITL"


def cumulative(values: list[float]) -> Points:
    """Return the points (value, share) of the empirical distribution function."""
    ordered = sorted(values)
    return [(value, (rank + 1) / len(ordered)) for rank, value in enumerate(ordered)]


def _over_time(records: list[dict[str, Any]]) -> list[Plot]:
    end = max((r["end"] for r in records), default=0.0)
    width = max(end / 60, 0.1)
    first = [(r["start"], 1000 * (r["first"] - r["start"])) for r in records if r["first"] is not None]
    return [
        Plot("Output over time", "s since start", "tokens/s", [Series("tokens/s", _tokens(records, width))]),
        Plot("TTFT over time", "s since start", "ms", [Series("TTFT, ms", first, dots=True)]),
    ]


def _tokens(records: list[dict[str, Any]], width: float) -> Points:
    bins: Counter[int] = Counter()
    for record in records:
        # A chunk may have several tokens, so the server's token count is spread evenly over the
        # chunks.
        weight = record["tokens_out"] / len(record["chunks"]) if record["chunks"] else 0
        for at in record["chunks"]:
            bins[math.floor(at / width)] += weight  # type: ignore[assignment]
    return [(width * (index + 0.5), bins[index] / width) for index in range(max(bins, default=-1) + 1)]


def _sweep(document: Document) -> list[Plot]:
    steps = sorted(document.sweep, key=lambda step: step.rate)
    if not steps:
        return []
    ttft = [(s.rate, s.ttft_p99) for s in steps if s.ttft_p99 is not None]
    e2e = [(s.rate, s.e2e_p99) for s in steps if s.e2e_p99 is not None]
    return [Plot("p99 by requested rate", "requests/s asked", "ms", [Series("TTFT", ttft), Series("E2E", e2e)])]
