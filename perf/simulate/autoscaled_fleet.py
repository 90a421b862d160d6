"""A simulated fleet whose replicas come and go as Kubernetes says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from llmops.perf.simulate.autoscaler import Autoscaler, AutoscalingSpec
from llmops.perf.simulate.clock import Clock


class ScalableFleet(Protocol):
    """What is scaled: replicas by number, of which the first few run."""

    clock: Clock

    def sums(self) -> Mapping[str, float]:
        """What Prometheus would say: requests that wait for their first token, shares of KV caches in use."""
        ...

    def set_ready(self, number: int) -> None: ...

    def drain(self, number: int) -> None:
        """It is gone; its answers go on elsewhere."""
        ...


class AutoscaledFleet:
    """Looks each `period`, as long as anything else happens. The last replica that came is the first that goes, as in
    a StatefulSet; `told` hears when how many there are."""

    def __init__(self, fleet: ScalableFleet, scaling: AutoscalingSpec, told: Callable[[float, int], None]) -> None:
        self._fleet, self._scaling, self._told = fleet, scaling, told
        self._autoscaler = Autoscaler(scaling)
        self._count = scaling.least
        # of each replica, how often it was asked for: one that was given up while it started never comes
        self._asked = [0] * scaling.most

    def begin(self) -> None:
        for number in range(self._count, self._scaling.most):
            self._fleet.drain(number)
        self._told(0.0, self._count)
        self._again()

    def _again(self) -> None:
        self._fleet.clock.at(self._fleet.clock.now + self._scaling.period, self._look)

    def _look(self) -> None:
        clock = self._fleet.clock
        wanted = self._autoscaler.replicas(clock.now, self._count, self._fleet.sums())
        if wanted != self._count:
            for number in range(wanted, self._count):
                self._asked[number] += 1
                self._fleet.drain(number)
            for number in range(self._count, wanted):
                self._start(number)
            self._count = wanted
            self._told(clock.now, wanted)
        if not clock.is_over:
            self._again()

    def _start(self, number: int) -> None:
        self._asked[number] += 1
        asked, clock = self._asked[number], self._fleet.clock

        def come() -> None:
            if self._asked[number] == asked:
                self._fleet.set_ready(number)

        clock.at(clock.now + self._scaling.cold_start, come)
