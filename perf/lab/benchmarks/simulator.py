"""`llmops simulate` held against four real mock engines: `python -m llmops.perf.lab.benchmarks.simulator ENGINE`.

One trace goes through a gateway to four mock engines in the real Triton, and through the simulator's fleet with the
same policies, limits and step times. It is scaled to what two cores carry: engines of 16 sequences whose steps take
some 200 ms, as if a GPU were forty times slower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from llmops.gateway.routing.admission.tiered_queue import PriorityTier
from llmops.perf.lab.fleet.replay import Went, replay
from llmops.perf.lab.fleet.stage import engines, front
from llmops.perf.lab.fleet.trace import Asked, Says, Talks, ceiling, jobs, mock_says, words_of
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.mock_engine.planned import constant
from llmops.perf.percentiles import percentile
from llmops.perf.simulate.fleet import Arrivals, FleetSpec, SimulatedFleet
from llmops.perf.simulate.replica import EngineSpec
from llmops.perf.simulate.step_times import LinearStepTimes
from llmops.perf.simulate.totals import sum_up
from llmops.perf.workloads.lengths import parse_lengths

REPLICAS, BLOCKS, SIZE, PLACES, CHUNK = 4, 1024, 16, 16, 1024
# times are longer by so much than the machine needs: what it takes in between, some 10 ms here and 100 there, is a
# small part of a first token then, and not half of it
SLOWER = 4
STEP, SEQUENCE, TOKEN = 0.04 * SLOWER, 0.002 * SLOWER, 0.0003 * SLOWER
TALKS = Talks(rate=1.0 / SLOWER, sessions=32, pace=0.055 * SLOWER, think=3.0 * SLOWER)
# conversations per second, of that: about as many as the engines can do
LOADS = {"busy": 1.5}
WAIT = 20.0 * SLOWER
OFF = 10.0


def measure(engine: Path) -> Section:
    text = (
        f"{REPLICAS} mock engines of {PLACES} sequences and {BLOCKS} blocks of {SIZE} tokens; a step takes "
        f"{1000 * STEP:g} ms, {1000 * SEQUENCE:g} ms more per sequence and {1000 * TOKEN:g} ms per prompt token. "
        f"{TALKS.sessions} conversations of {TALKS.turns} turns, sent at the same times to both. What gateway, Triton "
        "and this machine add is measured with single requests before each load, and added to what is simulated."
    )
    command = "python -m llmops.perf.lab.benchmarks.simulator ENGINE"
    section = Section("The simulator beside real engines", command, text)
    with section:
        says, words = mock_says(engine), words_of(engine)
        paged = constant(STEP, TOKEN, BLOCKS, SEQUENCE, max_batch_size=PLACES, max_num_tokens=CHUNK)
        with engines(engine, replace(paged, tokens_per_block=SIZE), REPLICAS) as stage:
            settings = {"tiers": {"standard": {"max_wait": f"{WAIT:g}s"}}}
            for seed, (name, rate) in enumerate(LOADS.items()):
                trace = replace(TALKS, rate=TALKS.rate * rate, seed=seed).asked(words, says)
                with front(stage.replicas, settings) as gateway:
                    added = _added(section, name, gateway.address, words)
                    before = stage.counts()
                    real = asyncio.run(replay(gateway.address, trace))
                    counts = [after - was for after, was in zip(stage.counts(), before, strict=True)]
                section.note(f"{name}: one endless cache would have {100 * ceiling(trace, SIZE, says):.1f} %")
                late = percentile(sorted(one.sent - one.asked.at for one in real.seen), 95)
                section.add(f"{name}: the sender itself was late by, p95 (there was no CPU for it)", 1000 * late, "ms")
                section.add(f"{name}: requests answered", len(real.ok), "", len(trace), "least")
                _compare(section, name, _real(real, counts), _simulated(trace, says, added))
    return section


@dataclass(frozen=True)
class Added:
    """Seconds to each step, and to each first token beside that."""

    step: float
    first: float


def _added(section: Section, name: str, url: str, words: Sequence[int]) -> Added:
    """What a request that is alone takes longer than its steps: it takes some 4 s, one comes in 5, and there are four
    engines. The fastest first token counts, which others on the machine disturb least; steps are as long under load as
    most of them are."""
    single = replace(TALKS, rate=0.2, sessions=10, turns=1, answer=parse_lengths("16"), seed=-1)
    done = asyncio.run(replay(url, single.asked(words))).ok
    step = median(one.tpot for one in done) - STEP - SEQUENCE
    first = min(one.ttft - (one.prompt - one.cached) * TOKEN for one in done) - STEP
    section.add(f"{name}: before it, a single request's steps are longer by", 1000 * step, "ms")
    section.add(f"{name}: … and its first token comes later by", 1000 * first, "ms")
    return Added(max(step, 0.0), max(first - step, 0.0))


def _compare(section: Section, name: str, real: dict[str, float], simulated: dict[str, float]) -> None:
    for figure, value in real.items():
        scale, unit = (1000, "ms") if figure.startswith("T") else (1, "")
        section.add(f"{name}: {figure}, real", scale * value, unit)
        section.add(f"{name}: {figure}, simulated", scale * simulated[figure], unit)
        section.add(f"{name}: {figure}: off by", 100 * abs(simulated[figure] / value - 1), "%", OFF)


def _real(went: Went, counts: Sequence[int]) -> dict[str, float]:
    return {
        **_times([one.ttft for one in went.ok], [one.tpot for one in went.ok]),
        "hit rate": went.hit_rate,
        "max/mean": max(counts) * len(counts) / max(sum(counts), 1),
    }


def _simulated(trace: Sequence[Asked], says: Says, added: Added) -> dict[str, float]:
    steps = LinearStepTimes(STEP + added.step, SEQUENCE, TOKEN)
    engine = EngineSpec(steps, BLOCKS, SIZE, max_batch_size=PLACES, max_num_tokens=CHUNK)
    spec = FleetSpec(engine, REPLICAS, tiers=(PriorityTier("standard", max_wait=WAIT),))
    outcome = SimulatedFleet(spec).run(Arrivals(iter(jobs(trace, SIZE, says))))
    done = [job for job in outcome.jobs if job.first >= 0]
    found = sum_up(outcome)
    first = [job.first - job.arrived + added.first for job in done]
    pace = [(job.end - job.first) / max(job.answer - 1, 1) for job in done]
    return {**_times(first, pace), "hit rate": found.hit_rate, "max/mean": found.imbalance}


def _times(first: Sequence[float], pace: Sequence[float]) -> dict[str, float]:
    both = {"TTFT": sorted(first), "TPOT": sorted(pace)}
    return {f"{name} p{q}": percentile(values, q) for name, values in both.items() for q in (50, 95)}


if __name__ == "__main__":
    script(measure, "ENGINE", "Replay one trace through real mock engines and through the simulator.")()
