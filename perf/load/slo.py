"""Service-level objectives as users type them (`ttft:200`, `tpot:50`, `itl:100`, `e2e:5000`: ms), and goodput."""

from __future__ import annotations

from dataclasses import dataclass

from llmops.errors import InputError
from llmops.perf.records import Record

METRICS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class Slo:
    """`metric` of a request is at most `seconds`. For `itl` that is the longest gap of the request."""

    metric: str
    seconds: float

    def held_by(self, record: Record) -> bool:
        """A request without the figure (one token has no gap) breaks nothing."""
        value = _value(record, self.metric)
        return value is None or value <= self.seconds


def parse_slo(text: str) -> Slo:
    """`METRIC:MILLISECONDS`. Raises InputError."""
    metric, _, limit = text.partition(":")
    try:
        seconds = float(limit.removesuffix("ms")) / 1000
    except ValueError:
        seconds = -1.0
    if metric not in METRICS or seconds <= 0:
        raise InputError(f"SLO {text!r} is invalid; write METRIC:MILLISECONDS with one of {', '.join(METRICS)}.")
    return Slo(metric, seconds)


def _value(record: Record, metric: str) -> float | None:
    if metric == "itl":
        return max(record.gaps, default=None)
    value: float | None = getattr(record, metric)
    return value


def is_good(record: Record, slos: list[Slo]) -> bool:
    """Answered without error, and every objective held."""
    return record.ok and all(slo.held_by(record) for slo in slos)
