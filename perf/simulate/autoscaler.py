"""Autoscaling as in Kubernetes: the triggers of KEDA, and the HorizontalPodAutoscaler's algorithm.

The algorithm follows https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/ and
the files `horizontal.go` and `replica_calculator.go` (external metrics with an average value) of
kubernetes/kubernetes, `pkg/controller/podautoscaler/`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Relative deviation from the target below which the number of replicas does not change: the
#: controller's default.
TOLERANCE = 0.1


@dataclass(frozen=True)
class AutoscalingSpec:
    """The settings of a ScaledObject as deploy/helm/llmops writes it.

    Attributes:
        least: Minimum number of replicas.
        most: Maximum number of replicas.
        targets: Target value per replica of each metric.
        period: Seconds between two decisions.
        grow: Maximum growth within `up_period`, as a factor.
        up_period: Seconds to which `grow` applies.
        shrink: Maximum number of replicas removed within `down_period`.
        down_period: Seconds to which `shrink` applies.
        window: Stabilisation window in seconds: scaling down stops at the highest recommendation of
            the window.
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
        # Recommendations as (time, replicas), and changes as (time, difference).
        self._recommendations: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()

    def replicas(self, now: float, current: int, sums: Mapping[str, float]) -> int:
        """Return the desired number of replicas from now on.

        Args:
            now: The time in seconds.
            current: The current number of replicas, including replicas that are starting.
            sums: The current value of each metric, summed over the replicas.
        """
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
    """Return the number of replicas that one metric recommends.

    `total` is the sum of the metric over the `current` replicas, and `target` the value per replica
    to reach.
    """
    if current and abs(total / (target * current) - 1) <= TOLERANCE:
        return current
    return math.ceil(total / target)
