"""Search for the highest open-loop rate that meets the objectives.

The search doubles the rate until a run fails, and continues with bisection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from llmops.objectives import Objective
from llmops.perf.load.objectives import attained_shares, meets_objectives, missed_objectives
from llmops.perf.load.runner import LoadRun
from llmops.perf.records import percentile

#: Width of the search interval, relative to its lower end, at which the search ends. Runs are not
#: precise enough for a narrower one.
RESOLUTION = 0.08
#: Ratio of the latency at the end of a run to the latency at its start from which the queue counts
#: as growing.
GROWTH = 2.0


@dataclass(frozen=True)
class SweepStep:
    """The result of a run at one rate.

    Attributes:
        rate: The requested rate in requests/s.
        holds: True if the run met the objectives and its latency did not grow.
        good_share: The share of requests that met every limit, from 0 to 1.
        achieved_rate: The completed requests per second.
        ttft_p99: The 99th percentile of the time to the first token in ms, or None without answers.
        e2e_p99: The 99th percentile of the time to the last token in ms, or None without answers.
        requests: The number of requests.
    """

    rate: float
    holds: bool
    good_share: float
    achieved_rate: float
    ttft_p99: float | None
    e2e_p99: float | None
    requests: int

    @classmethod
    def of(cls, rate: float, run: LoadRun, slos: list[Objective], share: float) -> SweepStep:
        records = run.stayed
        good = sum(meets_objectives(record, slos) for record in records) / max(1, len(records))
        first = sorted(1000 * record.ttft for record in records if record.ok and record.ttft is not None)
        whole = sorted(1000 * record.e2e for record in records if record.ok)
        return cls(
            rate=rate,
            holds=not missed_objectives(attained_shares(records, slos), slos, share) and _keeps_up(run),
            good_share=round(good, 4),
            achieved_rate=round(sum(record.ok for record in records) / max(run.seconds, 1e-9), 3),
            ttft_p99=round(percentile(first, 99), 3) if first else None,
            e2e_p99=round(percentile(whole, 99), 3) if whole else None,
            requests=len(records),
        )


def _keeps_up(run: LoadRun) -> bool:
    """Return True if the latency did not grow during a run.

    The median of the last third of answers must be at most GROWTH times the median of the first
    third. A run of fewer than 30 answers passes.
    """
    done = sorted((record for record in run.records if record.ok), key=lambda record: record.start)
    third = len(done) // 3
    if third < 10:
        return True
    early: float = sorted(record.e2e for record in done[:third])[third // 2]
    late: float = sorted(record.e2e for record in done[-third:])[third // 2]
    return late <= early * GROWTH


async def highest_rate(
    measure: Callable[[float], Awaitable[SweepStep]], start: float, ceiling: float
) -> SweepStep | None:
    """Return the result of the highest rate that meets the objectives, or None if no rate does.

    Args:
        measure: A function that runs the load at a rate.
        start: The first rate. The search gives up below a 32nd of `start`.
        ceiling: The highest rate to try.
    """
    step = await measure(start)
    best, broken = await (
        _double_until_broken(measure, step, ceiling)
        if step.holds
        else _halve_until_held(measure, step.rate, start / 32)
    )
    if best is None or broken is None:
        return best
    return await _bisect(measure, best, broken)


async def _double_until_broken(
    measure: Callable[[float], Awaitable[SweepStep]], best: SweepStep, ceiling: float
) -> tuple[SweepStep | None, float | None]:
    while best.rate < ceiling:
        step = await measure(min(best.rate * 2, ceiling))
        if not step.holds:
            return best, step.rate
        best = step
    return best, None


async def _halve_until_held(
    measure: Callable[[float], Awaitable[SweepStep]], broken: float, floor: float
) -> tuple[SweepStep | None, float | None]:
    while broken / 2 >= floor:
        step = await measure(broken / 2)
        if step.holds:
            return step, broken
        broken = step.rate
    return None, broken


async def _bisect(measure: Callable[[float], Awaitable[SweepStep]], best: SweepStep, broken: float) -> SweepStep:
    while broken / best.rate - 1 > RESOLUTION:
        step = await measure(round((best.rate + broken) / 2, 4))
        best, broken = (step, broken) if step.holds else (best, step.rate)
    return best
