"""Warnings about the figures of a run."""

from llmops.perf.report.document import Document
from llmops.perf.report.summary import BUSY_SHARE

MAX_LAG_MS = 20.0


def list_warnings(document: Document) -> list[str]:
    """Return a sentence for each circumstance that makes the figures less reliable."""
    summary, found = document.summary, []
    if summary.own_cpu_share > BUSY_SHARE:
        found.append(
            f"The load generator used {100 * summary.own_cpu_share:.0f} % of a core, so it may have caused latencies. "
            "Use less load, or run it on another machine."
        )
    if summary.schedule_lag_p99_ms > MAX_LAG_MS:
        found.append(
            f"Requests left up to {summary.schedule_lag_p99_ms:.0f} ms (p99) later than scheduled. "
            "Use less load, or run the load generator on another machine."
        )
    if summary.tokens_source in ("chunks", "mixed"):
        found.append(
            "The server sent no usage, so output tokens are counted chunks, which may hold more than one token."
        )
    if summary.short_answers:
        found.append(
            f"{summary.short_answers} of {summary.completed} answers were shorter than asked: "
            "the server ended them early (no ignore_eos?), so runs are not comparable by tokens/s alone."
        )
    if 0 < summary.completed < 100:
        found.append(f"p99 of {summary.completed} requests is nearly the maximum; send at least 100 requests.")
    found += _sweep_notes(document)
    return found


def _sweep_notes(document: Document) -> list[str]:
    if not document.sweep:
        return []
    holding = [step for step in document.sweep if step.holds]
    slos = ", ".join(document.options.get("slos", ()))
    if not holding:
        return [f"None of the tried rates meets {slos}; the figures above are of the lowest rate."]
    best = max(holding, key=lambda step: step.rate)
    found = f"The highest rate that meets {slos} is {best.rate:g} requests/s; the figures above are of that run."
    return [found, *_too_few(best.requests, document.options.get("slo_share", 0.99))]


def _too_few(requests: int, share: float) -> list[str]:
    """Return a warning if too few requests ran to show that `share` of them met the objectives.

    By the rule of three, the share is above 1 - 3/n with 95 % confidence if all of n requests
    succeed.
    """
    needed = round(3 / (1 - share)) if share < 1 else 0
    if requests >= needed:
        return []
    return [
        f"The run had {requests} requests, and at least {needed} are needed to show that {100 * share:g} % are good: "
        "raise --duration, or take the rate as an estimate."
    ]
