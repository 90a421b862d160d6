"""Which plots a run gets."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

from llmops.perf.report.document import Document
from llmops.perf.report.svg import Plot, Points, Series


def plots(document: Document) -> list[Plot]:
    """Latency distributions, what happened over time and, after a sweep, latency and goodput against the rate."""
    records = [r for r in document.records if r["error"] is None and not r["cancelled"]]
    ttft = [1000 * (r["first"] - r["start"]) for r in records if r["first"] is not None]
    gaps = [1000 * (b - a) for r in records for a, b in pairwise(r["chunks"])]
    e2e = [1000 * (r["end"] - r["start"]) for r in records]
    distributions = [
        Plot(f"{name}: share of {of} up to", "ms", "share", [Series(name, cumulative(values))], y_max=1)
        for name, of, values in (("TTFT", "requests", ttft), ("ITL", "gaps", gaps), ("End to end", "requests", e2e))
        if values
    ]
    return [*_sweep(document), *distributions, *_over_time(document.records)]


def cumulative(values: list[float]) -> Points:
    """The empirical distribution function as points."""
    ordered = sorted(values)
    return [(value, (rank + 1) / len(ordered)) for rank, value in enumerate(ordered)]


def _over_time(records: list[dict[str, Any]]) -> list[Plot]:
    end = max((r["end"] for r in records), default=0.0)
    width = max(end / 60, 0.1)
    first = [(r["start"], 1000 * (r["first"] - r["start"])) for r in records if r["first"] is not None]
    return [
        Plot("Output over time", "s", "tokens/s", [Series("tokens/s", _tokens(records, width))]),
        Plot("Requests in flight", "s", "requests", [Series("in flight", _in_flight(records))]),
        Plot("TTFT over time", "s", "ms", [Series("TTFT", first, dots=True)]),
    ]


def _tokens(records: list[dict[str, Any]], width: float) -> Points:
    bins: Counter[int] = Counter()
    for record in records:
        # a chunk may hold several tokens: the server's own count is spread over the chunks
        weight = record["tokens_out"] / len(record["chunks"]) if record["chunks"] else 0
        for at in record["chunks"]:
            bins[math.floor(at / width)] += weight  # type: ignore[assignment]
    return [(width * (index + 0.5), bins[index] / width) for index in range(max(bins, default=-1) + 1)]


def _in_flight(records: list[dict[str, Any]]) -> Points:
    edges = sorted([(r["start"], 1) for r in records] + [(r["end"], -1) for r in records])
    points: Points = []
    level = 0
    for at, change in edges:
        points.append((at, level))
        level += change
        points.append((at, level))
    return points


def _sweep(document: Document) -> list[Plot]:
    steps = sorted(document.sweep, key=lambda step: step.rate)
    if not steps:
        return []
    ttft = [(s.rate, s.ttft_p99) for s in steps if s.ttft_p99 is not None]
    e2e = [(s.rate, s.e2e_p99) for s in steps if s.e2e_p99 is not None]
    good = [(s.rate, s.good_share) for s in steps]
    done = [(s.rate, s.achieved_rate) for s in steps]
    return [
        Plot("p99 against the rate asked", "requests/s", "ms", [Series("TTFT", ttft), Series("end to end", e2e)]),
        Plot("Share that holds the objectives", "requests/s", "share", [Series("good", good)], y_max=1),
        Plot(
            "Achieved rate",
            "requests/s asked",
            "requests/s",
            [Series("done", done)],
        ),
    ]
