"""One simulation: cells of a large fleet, each with its share of what comes, in as many processes as one likes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context

from llmops.perf.load.runner import LoadRun
from llmops.perf.records import Record
from llmops.perf.simulate.fleet import Arrivals, FleetSpec, SimulatedFleet, Told
from llmops.perf.simulate.totals import SimulationTotals, records, sum_up

# Replicas that one set of gateways looks after; larger fleets are several of these beside each other.
CELL_SIZE = 64


@dataclass
class SimulationResult:
    """All requests of a run, and what it took to simulate them (CPU seconds)."""

    run: LoadRun
    tally: SimulationTotals = field(default_factory=SimulationTotals)
    simulated: int = 0
    cpu: float = 0.0


@dataclass(frozen=True)
class FleetCell:
    """A part of the fleet and how its requests are made. Of the first `skipped` seconds nothing is reported; `added`:
    seconds that answers take on their way, beside what is simulated."""

    spec: FleetSpec
    work: Callable[[], Arrivals]
    skipped: float = 0.0
    added: float = 0.0


def cell_sizes(replicas: int) -> list[int]:
    """How many replicas each cell has: about `CELL_SIZE`, and about equal."""
    count = -(-replicas // CELL_SIZE)
    return [replicas // count + (number < replicas % count) for number in range(count)]


def simulate(parts: Sequence[FleetCell], jobs: int = 1, told: Told = None) -> SimulationResult:
    """`jobs`: processes. `told`: how far a cell is, in seconds, and how many of its requests have ended, now and then;
    of several processes nothing is heard until they are done."""
    whole = SimulationResult(LoadRun(0.0))
    for rows, sums, simulated, cpu in _all(parts, jobs, told):
        whole.run.records += rows
        whole.tally.add(sums)
        whole.simulated += simulated
        whole.cpu += cpu
    whole.run.start = min((row.start for row in whole.run.records), default=0.0)
    whole.run.end = max((row.end for row in whole.run.records), default=0.0)
    return whole


_Found = tuple[list[Record], SimulationTotals, int, float]
# of a process that was made for them: what they are made of cannot be sent to it
_parts: Sequence[FleetCell] = ()


def _all(parts: Sequence[FleetCell], jobs: int, told: Told) -> list[_Found]:
    if jobs == 1 or len(parts) == 1:
        return [_one(part, told) for part in parts]
    with ProcessPoolExecutor(min(jobs, len(parts)), get_context("fork"), _remember, (parts,)) as pool:
        return list(pool.map(_numbered, range(len(parts))))


def _remember(parts: Sequence[FleetCell]) -> None:
    global _parts
    _parts = parts


def _numbered(number: int) -> _Found:
    return _one(_parts[number])


def _one(part: FleetCell, told: Told = None) -> _Found:
    began = time.process_time()
    outcome = SimulatedFleet(part.spec, told).run(part.work())
    cpu = time.process_time() - began
    return records(outcome.jobs, part.skipped, part.added), sum_up(outcome, part.skipped), len(outcome.jobs), cpu


def make_cells(
    spec: FleetSpec, sizes: Sequence[int], work: Callable[[float, int], Arrivals], skipped: float, added: float = 0.0
) -> list[FleetCell]:
    """`work` makes the arrivals of a cell from its share of the fleet and its number."""
    total, parts = sum(sizes), []
    for number, size in enumerate(sizes):
        first = sum(sizes[:number])
        failures = [replace(one, replica=one.replica - first) for one in spec.failures]
        own = replace(
            spec,
            replicas=size,
            seed=spec.seed * 1009 + number,
            failures=[one for one in failures if 0 <= one.replica < size],
        )
        parts.append(FleetCell(own, partial(work, size / total, number), skipped, added))
    return parts
