"""A simulation run in several processes.

A large fleet is divided into cells, each with its share of the load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context

from llmops.perf.load.runner import LoadRun
from llmops.perf.records import Record
from llmops.perf.simulate.fleet import Arrivals, FleetSpec, OnProgress, SimulatedFleet
from llmops.perf.simulate.totals import SimulationTotals, records, sum_up

#: Number of replicas behind one set of gateways. Larger fleets are divided into several cells,
#: which can run in parallel processes.
CELL_SIZE = 64

#: Number of replicas of a cell in a herd. The number is smaller than CELL_SIZE, because in a herd a
#: gateway mostly rejects requests.
HERD_CELL_SIZE = 8


@dataclass
class SimulationResult:
    """The result of a whole run.

    Attributes:
        run: The records of the requests.
        tally: The totals over all requests and replicas.
        simulated: Number of simulated requests.
        cpu: CPU seconds of the simulation.
    """

    run: LoadRun
    tally: SimulationTotals = field(default_factory=SimulationTotals)
    simulated: int = 0
    cpu: float = 0.0


@dataclass(frozen=True)
class FleetCell:
    """A part of the fleet and its share of the load.

    Attributes:
        spec: The settings of the cell's fleet.
        work: A function that returns the cell's arrivals.
        skipped: Seconds at the beginning that are not reported.
        added: Seconds that answers take in addition to the simulated time.
    """

    spec: FleetSpec
    work: Callable[[], Arrivals]
    skipped: float = 0.0
    added: float = 0.0


def cell_sizes(replicas: int, size: int = CELL_SIZE) -> list[int]:
    """Return the sizes of equally sized cells of about `size` replicas."""
    count = -(-replicas // size)
    return [replicas // count + (number < replicas % count) for number in range(count)]


def simulate(parts: Sequence[FleetCell], jobs: int = 1, on_progress: OnProgress = None) -> SimulationResult:
    """Simulate all cells and return the joint result.

    Args:
        parts: The cells.
        jobs: Number of processes.
        on_progress: A function that is called now and then with the simulated seconds and the
            finished requests of a cell. The function is called only if there
            is one process or one cell.
    """
    whole = SimulationResult(LoadRun(0.0))
    for rows, sums, simulated, cpu in _all(parts, jobs, on_progress):
        whole.run.records += rows
        whole.tally.add(sums)
        whole.simulated += simulated
        whole.cpu += cpu
    whole.run.start = min((row.start for row in whole.run.records), default=0.0)
    whole.run.end = max((row.end for row in whole.run.records), default=0.0)
    return whole


_Found = tuple[list[Record], SimulationTotals, int, float]
# Forked processes inherit the cells, which cannot be pickled.
_parts: Sequence[FleetCell] = ()


def _all(parts: Sequence[FleetCell], jobs: int, on_progress: OnProgress) -> list[_Found]:
    if jobs == 1 or len(parts) == 1:
        return [_one(part, on_progress) for part in parts]
    with ProcessPoolExecutor(min(jobs, len(parts)), get_context("fork"), _remember, (parts,)) as pool:
        return list(pool.map(_numbered, range(len(parts))))


def _remember(parts: Sequence[FleetCell]) -> None:
    global _parts
    _parts = parts


def _numbered(number: int) -> _Found:
    return _one(_parts[number])


def _one(part: FleetCell, on_progress: OnProgress = None) -> _Found:
    began = time.process_time()
    outcome = SimulatedFleet(part.spec, on_progress).run(part.work())
    cpu = time.process_time() - began
    return records(outcome.jobs, part.skipped, part.added), sum_up(outcome, part.skipped), len(outcome.jobs), cpu


def make_cells(
    spec: FleetSpec,
    sizes: Sequence[int],
    work: Callable[[float, float, int], Arrivals],
    skipped: float,
    added: float = 0.0,
) -> list[FleetCell]:
    """Return the cells of a fleet.

    Args:
        spec: The settings of the whole fleet.
        sizes: The number of replicas of each cell.
        work: Returns the arrivals of a cell, from the beginning and end of its part of the fleet,
            such as 0.25 and 0.5, and its number.
        skipped: The seconds at the beginning whose arrivals are not counted.
        added: The seconds that answers take in addition to the simulated time.
    """
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
        parts.append(FleetCell(own, partial(work, first / total, (first + size) / total, number), skipped, added))
    return parts
