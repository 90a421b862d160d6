"""How long a request would wait, from what was let through while others waited."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmops.gateway.interfaces import ReplicaView
from llmops.gateway.routing.cost_model import DEFAULT_PREFILL_RATE

# Seconds of waiting in which what was seen before counts for a third.
THROUGHPUT_TIME_CONSTANT = 5.0
# … and for how many seconds of it the replicas' own figures stand at first.
PRIOR_SECONDS = 0.5


class QueueThroughput:
    """Cost per second that leaves the queue while there is one. Time without a queue says nothing of it."""

    def __init__(self) -> None:
        self._cost = self._seconds = 0.0
        self._since: float | None = None

    def backlog(self, waits: bool, now: float) -> None:
        """Somebody waits from now on, or nobody does."""
        if self._since is not None:
            self._pass(now)
        self._since = now if waits else None

    def left(self, cost: float) -> None:
        """So much has left the queue."""
        if self._since is not None:
            self._cost += cost

    def rate(self, views: Sequence[ReplicaView]) -> float:
        """Cost per second. Until it was seen for long, what the replicas can read counts too."""
        capacity = sum(view.prefill_rate or DEFAULT_PREFILL_RATE for view in views if view.state == "ready")
        return max((self._cost + capacity * PRIOR_SECONDS) / (self._seconds + PRIOR_SECONDS), 1.0)

    def _pass(self, now: float) -> None:
        passed = now - self._since if self._since is not None else 0.0
        # a clock that jumps is not a queue that stood still
        if 0 < passed < 60:
            kept = math.exp(-passed / THROUGHPUT_TIME_CONSTANT)
            self._cost *= kept
            self._seconds = self._seconds * kept + THROUGHPUT_TIME_CONSTANT * (1 - kept)
