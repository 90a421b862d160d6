"""Autoscaling as in Kubernetes: KEDA's sums and the algorithm of the HorizontalPodAutoscaler.

Source: https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/ and
kubernetes/kubernetes `pkg/controller/podautoscaler/horizontal.go`, `replica_calculator.go`
(external metrics with an average value).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Relative deviation from the target below which nothing changes, as in the controller.
TOLERANCE = 0.1


@dataclass(frozen=True)
class AutoscalingSpec:
    """A ScaledObject as deploy/helm/llmops writes it.

    Attributes:
        least: Minimum number of replicas.
        most: Maximum number of replicas.
        targets: Value per replica of each sum.
        period: Seconds between two decisions.
        grow: Largest growth, as a factor within `up_period` seconds.
        up_period: Seconds to which `grow` applies.
        shrink: Largest number of replicas removed within `down_period` seconds.
        down_period: Seconds to which `shrink` applies.
        window: Seconds of decisions whose maximum limits scaling down.
        cold_start: Seconds until a new replica is ready.
    """

    least: int = 1
    most: int = 4
    targets: Mapping[str, float] = field(default_factory=lambda: {"waiting": 8.0, "kv": 0.8})
    period: float = 15.0
    grow: float = 2.0
    up_period: float = 60.0
    shrink: int = 1
    down_period: float = 120.0
    window: float = 600.0
    cold_start: float = 180.0


class Autoscaler:
    """The state of an autoscaler: its recent recommendations and changes."""

    def __init__(self, scaling: AutoscalingSpec) -> None:
        self._scaling = scaling
        # (time, replicas) that the sums recommended, and (time, difference) of changes
        self._recommendations: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()

    def replicas(self, now: float, current: int, sums: Mapping[str, float]) -> int:
        """Return the number of replicas from now on. `current` includes those that are starting."""
        scaling = self._scaling
        recommended = max(_recommend(sums[name], target, current) for name, target in scaling.targets.items())
        self._recommendations.append((now, recommended))
        while self._recommendations[0][0] <= now - scaling.window:
            self._recommendations.popleft()
        if recommended < current:
            recommended = min(max(count for _, count in self._recommendations), current)
        chosen = min(
            max(recommended, scaling.least, self._floor(now, current)), scaling.most, self._ceiling(now, current)
        )
        if chosen != current:
            self._changes.append((now, chosen - current))
        return chosen

    def _ceiling(self, now: float, current: int) -> int:
        began = current - self._changed(now - self._scaling.up_period)
        return max(math.ceil(began * self._scaling.grow), current)

    def _floor(self, now: float, current: int) -> int:
        began = current - self._changed(now - self._scaling.down_period)
        return min(began - self._scaling.shrink, current)

    def _changed(self, since: float) -> int:
        return sum(by for when, by in self._changes if when > since)


def _recommend(total: float, target: float, current: int) -> int:
    """Return the number of replicas that one sum recommends."""
    if current and abs(total / (target * current) - 1) <= TOLERANCE:
        return current
    return math.ceil(total / target)
