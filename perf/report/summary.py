"""The figures of a run, computed from its records."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from llmops.objectives import Objective
from llmops.perf.load.objectives import attained_shares, meets_objectives
from llmops.perf.load.runner import LoadRun
from llmops.perf.records import Record, percentile

PERCENTILES = (50, 90, 95, 99)
# The latency distributions of a summary, and their usual names.
LATENCIES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E", "overhead": "Overhead"}
#: CPU share of one core from which the load generator may itself be the bottleneck.
BUSY_SHARE = 0.7


@dataclass(frozen=True)
class Distribution:
    """A latency distribution in milliseconds."""

    count: int
    mean: float
    maximum: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> Self | None:
        """Return the distribution of values in seconds, or None without values."""
        if not seconds:
            return None
        ordered = sorted(1000 * value for value in seconds)
        points = {f"p{p}": round(percentile(ordered, p), 4) for p in PERCENTILES}
        mean = sum(ordered) / len(ordered)
        return cls(len(ordered), round(mean, 4), round(ordered[-1], 4), **points)


@dataclass(frozen=True)
class Summary:
    """The figures of a run.

    Rates are per second, in the time from the first request to the last answer.
    """

    seconds: float
    requests: int
    completed: int
    cancelled: int
    failed: int
    errors: dict[str, int]
    tokens_in: int | None
    tokens_out: int
    tokens_source: str
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float | None
    goodput_share: float | None
    goodput_per_second: float | None
    mean_input: float | None
    mean_output: float | None
    short_answers: int
    tool_calls: int
    own_cpu_share: float
    own_cpu_us_per_token: float | None
    schedule_lag_p99_ms: float
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    overhead: Distribution | None
    # The share of requests that met each objective, by the objective's text.
    attained: dict[str, float | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(run: LoadRun, slos: list[Objective]) -> Summary:
    """Return the figures of a run.

    Latencies are of completed requests only. Tokens are of all requests, including cancelled ones.
    """
    records = run.records
    done = [record for record in records if record.ok]
    good = sum(meets_objectives(record, slos) for record in records) if slos else None
    inputs = [record.tokens_in for record in records if record.tokens_in is not None]
    tokens_out = sum(record.tokens_out for record in records)
    seconds = max(run.seconds, 1e-9)
    return Summary(
        seconds=round(run.seconds, 4),
        requests=len(records),
        completed=len(done),
        cancelled=sum(record.cancelled for record in records),
        failed=sum(record.error is not None for record in records),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        tokens_in=sum(inputs) if inputs else None,
        tokens_out=tokens_out,
        tokens_source=_source(done),
        requests_per_second=round(len(done) / seconds, 4),
        output_tokens_per_second=round(tokens_out / seconds, 3),
        total_tokens_per_second=round((tokens_out + sum(inputs)) / seconds, 3) if inputs else None,
        goodput_share=None if good is None else round(good / max(1, len(run.stayed)), 5),
        goodput_per_second=None if good is None else round(good / seconds, 4),
        mean_input=_mean(inputs),
        mean_output=_mean([record.tokens_out for record in done]),
        short_answers=sum(record.tokens_out < record.requested for record in done),
        tool_calls=sum(record.tool_calls for record in records),
        own_cpu_share=round(run.cpu / seconds, 4),
        own_cpu_us_per_token=round(1e6 * run.cpu / tokens_out, 2) if tokens_out else None,
        schedule_lag_p99_ms=_p99([record.lag for record in records]) or 0.0,
        ttft=Distribution.of([record.ttft for record in done if record.ttft is not None]),
        itl=Distribution.of([gap for record in done for gap in record.gaps]),
        tpot=Distribution.of([record.tpot for record in done if record.tpot is not None]),
        e2e=Distribution.of([record.e2e for record in done]),
        overhead=Distribution.of([record.overhead_ms / 1000 for record in done if record.overhead_ms is not None]),
        attained=attained_shares(run.stayed, slos),
    )


def _mean(values: list[int]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None


def _p99(seconds: list[float]) -> float | None:
    return round(1000 * percentile(sorted(seconds), 99), 3) if seconds else None


def _source(done: list[Record]) -> str:
    """Return the source of the output token counts: the server, the client, or both."""
    kinds = {record.counted for record in done}
    if not kinds:
        return "none"
    if kinds == {False}:
        return "usage"
    return "chunks" if kinds == {True} else "mixed"
