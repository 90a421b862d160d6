"""The throughput of a queue while requests wait, from which waits are predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmops.gateway.interfaces import ReplicaView
from llmops.gateway.routing.cost_model import DEFAULT_PREFILL_RATE

#: Time constant of the throughput: seconds of queueing after which the weight of an observation
#: falls to 1/e.
THROUGHPUT_TIME_CONSTANT = 5.0
#: Weight of the replicas' reported prefill rates at the start, in seconds of observation: small, so
#: that observations soon outweigh the reports.
PRIOR_SECONDS = 0.5
#: Maximum seconds between two updates that count: a clock that jumped does not mean that the queue
#: stood still.
MAX_INTERVAL = 60.0


class QueueThroughput:
    """The cost per second that leaves the queue, in prompt tokens per second.

    Time without waiting requests does not count.
    """

    def __init__(self) -> None:
        self._cost = self._seconds = 0.0
        self._updated: float | None = None

    def update_backlog(self, is_queued: bool, now: float) -> None:
        """Record whether requests wait from now on."""
        if self._updated is not None:
            self._age(now - self._updated)
        self._updated = now if is_queued else None

    def record_departure(self, cost: float) -> None:
        """Record that a request of this cost left the queue."""
        if self._updated is not None:
            self._cost += cost

    def rate(self, views: Sequence[ReplicaView]) -> float:
        """Return the cost that leaves the queue per second.

        Until requests have waited for some seconds, the result follows from the prefill rates of
        the ready replicas.
        """
        capacity = sum(view.prefill_rate or DEFAULT_PREFILL_RATE for view in views if view.state == "ready")
        return max((self._cost + capacity * PRIOR_SECONDS) / (self._seconds + PRIOR_SECONDS), 1.0)

    def _age(self, elapsed: float) -> None:
        if 0 < elapsed < MAX_INTERVAL:
            kept = math.exp(-elapsed / THROUGHPUT_TIME_CONSTANT)
            self._cost *= kept
            self._seconds = self._seconds * kept + THROUGHPUT_TIME_CONSTANT * (1 - kept)
