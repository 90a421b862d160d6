"""Reports of a simulated run.

They are the reports of `llmops bench`, with additional figures that only a simulation has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from llmops.objectives import Objective
from llmops.perf.report import terminal
from llmops.perf.report.document import Document, machine
from llmops.perf.report.summary import Distribution, summarise
from llmops.perf.simulate.run import SimulationResult


def document_of(
    done: SimulationResult, slos: list[Objective], options: Mapping[str, Any], fleet: Mapping[str, Any]
) -> Document:
    """Return the document of a simulated run.

    Args:
        done: The result of the simulation.
        slos: The objectives.
        options: A description of the load.
        fleet: A description of the fleet.
    """
    # The tokens of a simulated answer are evenly spaced, so the gaps between them mean nothing.
    summary = replace(summarise(done.run, slos), itl=None)
    figures = {**done.tally.figures(), "simulated_requests": done.simulated, "cpu_seconds": round(done.cpu, 3)}
    rows = sorted(done.run.records, key=lambda record: record.start)
    return Document(
        options={**options, "fleet": dict(fleet), "simulated": figures},
        machine=machine(),
        summary=summary,
        origin=done.run.start,
        records=[record.to_json(done.run.start) for record in rows],
    )


def show(document: Document, console: Console) -> None:
    terminal.show(document, console)
    console.print(terminal.figures_table(fleet_rows(document), title="Fleet"))


def fleet_rows(document: Document) -> list[tuple[str, str]]:
    """Return (label, value) of each figure that only a simulation has."""
    known = document.options["simulated"]
    rows = [
        ("Replicas, GPUs", f"{known['replicas']:,}, {known['gpus']:,}"),
        (
            "Prompt tokens from the cache",
            f"{100 * known['hit_rate']:.1f} %, at most {100 * known['ceiling']:.1f} % possible",
        ),
        ("Requests of the busiest replica", f"{known['imbalance']:.2f} x the mean"),
        ("Replicas at work", f"{100 * known['busy']:.1f} % of the time, the busiest {100 * known['busiest']:.1f} %"),
        ("Longest queue inside an engine", f"{known['longest_queue']:,}"),
        ("Refused", f"{known['refused']:,}"),
        ("GPU-hours", f"{known['gpu_hours']:,.1f} ({known['dollars']:,.2f} $)"),
    ]
    if known["dollars_per_million_answer_tokens"]:
        both, answers = known["dollars_per_million_tokens"], known["dollars_per_million_answer_tokens"]
        rows.append(("$ per million tokens", f"{both:.3f}, of answers alone {answers:.3f}"))
    if known.get("scaled"):
        rows.insert(1, ("Replicas over time", _over_time(known["scaled"])))
    if document.options.get("herd") and not (document.options.get("rate") or document.options.get("day")):
        ends = sorted(known["drained"].items(), key=lambda tier: tier[1])
        rows.append(("Drained after", ", ".join(f"{tier} {end:,.0f} s" for tier, end in ends)))
        rows.append(("Tries per client", f"{document.summary.requests / document.options['herd']:.2f}"))
    if known.get("degraded"):
        rows.append(("Degraded mode over time", _over_time(known["degraded"])))
    if known.get("rollout"):
        rows.append(("Percent to the new version", _over_time(known["rollout"])))
    if known["moved"]:
        rows.append(("Continued elsewhere", f"{known['moved']:,}"))
    rows.append(("Simulated", f"{known['simulated_requests']:,} requests in {known['cpu_seconds']:,.1f} s of CPU"))
    return rows


def _over_time(scaled: Sequence[Sequence[float]], most: int = 12) -> str:
    """Return the last `most` changes as text: `1 at 0 s, 3 at 120 s, …`."""
    said = [f"{count:.0f} at {when:,.0f} s" for when, count in scaled[-most:]]
    return ("… " if len(scaled) > most else "") + ", ".join(said)


def show_comparison(documents: Sequence[tuple[str, Document]], console: Console) -> None:
    """Print a table with a column for each policy, all on the same requests."""
    figures = zip(*(_cells(document) for _, document in documents), strict=True)
    rows = [[first[0], first[1], *(cell[1] for cell in others)] for first, *others in figures]
    console.print(terminal.figures_table(rows, ["", *(name for name, _ in documents)]))


def _cells(document: Document) -> list[tuple[str, str]]:
    summary, known = document.summary, document.options["simulated"]
    good = "–" if summary.goodput_share is None else f"{100 * summary.goodput_share:.1f} %"
    return [
        ("Goodput", good),
        ("Good, requests/s", "–" if summary.goodput_per_second is None else f"{summary.goodput_per_second:,.2f}"),
        ("Hit rate", f"{known['hit_rate']:.3f}"),
        ("Requests of the busiest replica, x mean", f"{known['imbalance']:.2f}"),
        ("Replicas at work, the busiest", f"{100 * known['busy']:.0f} %, {100 * known['busiest']:.0f} %"),
        ("TTFT p50, ms", _percentile(summary.ttft, "p50")),
        ("TTFT p95, ms", _percentile(summary.ttft, "p95")),
        ("TPOT p95, ms", _percentile(summary.tpot, "p95")),
        ("Refused", f"{known['refused']:,}"),
        ("Longest queue in an engine", f"{known['longest_queue']:,}"),
        ("Drained after, s", f"{max(known['drained'].values(), default=0.0):,.1f}"),
    ]


def _percentile(found: Distribution | None, name: str) -> str:
    return "–" if found is None else terminal.milliseconds(getattr(found, name))
