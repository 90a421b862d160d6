"""A simulation run of a fleet.

A large fleet is divided into cells, each with its share of the load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from llmops.perf.load.runner import LoadRun
from llmops.perf.simulate.fleet import Arrivals, FleetSpec, OnProgress, SimulatedFleet
from llmops.perf.simulate.totals import SimulationTotals, records, sum_up

#: Number of replicas behind one set of gateways. Larger fleets are divided into several cells.
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


def simulate(parts: Sequence[FleetCell], on_progress: OnProgress = None) -> SimulationResult:
    """Simulate all cells and return the joint result.

    Args:
        parts: The cells.
        on_progress: A function that is called now and then with the simulated seconds and the
            finished requests of a cell.
    """
    whole = SimulationResult(LoadRun(0.0))
    for part in parts:
        began = time.process_time()
        outcome = SimulatedFleet(part.spec, on_progress).run(part.work())
        whole.cpu += time.process_time() - began
        whole.run.records += records(outcome.jobs, part.skipped, part.added)
        whole.tally.add(sum_up(outcome, part.skipped))
        whole.simulated += len(outcome.jobs)
    whole.run.start = min((row.start for row in whole.run.records), default=0.0)
    whole.run.end = max((row.end for row in whole.run.records), default=0.0)
    return whole


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
