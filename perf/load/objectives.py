"""Service-level objectives as users write them, and goodput.

Examples are `ttft:200ms`, `tpot:50ms`, `itl:100ms` and `e2e:5s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmops.errors import InputError
from llmops.perf.records import Record
from llmops.units import Seconds, parse_duration

METRICS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class Objective:
    """An objective: `metric` of a request is at most `seconds`.

    For `itl` that is the request's longest gap.
    """

    metric: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.metric}:{Seconds(self.seconds)}"

    def held_by(self, record: Record) -> bool:
        """Return True if a record meets the objective.

        A record without the figure, such as gaps of one token, meets it.
        """
        value = _value(record, self.metric)
        return value is None or value <= self.seconds


def parse_objective(text: str) -> Objective:
    """Return the objective written as `METRIC:DURATION`. Raises InputError."""
    metric, colon, limit = text.partition(":")
    if not colon:
        raise InputError(f"The objective {text!r} has no colon; write METRIC:DURATION, as in ttft:200ms.")
    try:
        found = parse_duration(limit)
    except ValueError as error:
        raise InputError(f"The objective {text!r} is not usable: {error}, as in ttft:200ms.") from error
    if metric not in METRICS or not found:
        raise InputError(f"The objective {text!r} is not usable; write one of {', '.join(METRICS)}, as in ttft:200ms.")
    return Objective(metric, found)


def _value(record: Record, metric: str) -> float | None:
    if metric == "itl":
        return max(record.gaps, default=None)
    value: float | None = getattr(record, metric)
    return value


def meets_objectives(record: Record, slos: list[Objective]) -> bool:
    """Return True if a request was answered without error and met every objective."""
    return record.ok and all(slo.held_by(record) for slo in slos)
