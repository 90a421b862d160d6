"""A simulation run: cells of a large fleet, each with its share of the load, in several processes."""

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

#: Replicas of one set of gateways. Larger fleets are several such cells.
CELL_SIZE = 64

#: The same for a herd, for which a gateway has fewer replicas: it mostly rejects.
HERD_CELL_SIZE = 8


@dataclass
class SimulationResult:
    """The requests of a whole run, and the CPU seconds of the simulation."""

    run: LoadRun
    tally: SimulationTotals = field(default_factory=SimulationTotals)
    simulated: int = 0
    cpu: float = 0.0


@dataclass(frozen=True)
class FleetCell:
    """A part of the fleet and its load. The first `skipped` seconds are not reported.

    `added`: seconds that answers take beside what is simulated.
    """

    spec: FleetSpec
    work: Callable[[], Arrivals]
    skipped: float = 0.0
    added: float = 0.0


def cell_sizes(replicas: int, size: int = CELL_SIZE) -> list[int]:
    """Return the numbers of replicas of cells of about equal size, near `size`."""
    count = -(-replicas // size)
    return [replicas // count + (number < replicas % count) for number in range(count)]


def simulate(parts: Sequence[FleetCell], jobs: int = 1, on_progress: OnProgress = None) -> SimulationResult:
    """Simulate all cells and return their joint result.

    Args:
        parts: The cells.
        jobs: Number of processes.
        on_progress: Called now and then with the simulated seconds and the finished requests of a
            cell; only with one process.
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
# the cells in a forked process, to which they cannot be pickled
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

    `work` returns the arrivals of a cell from where its part of the fleet begins and ends, such as
    0.25 and 0.5, and its number.
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
