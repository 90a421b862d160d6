"""Slow start: a limit on the prompt tokens sent to a replica that has just become ready.

The caches of such a replica are still empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmops.gateway.interfaces import ReplicaView
from llmops.gateway.routing.cost_model import DEFAULT_PREFILL_RATE

#: Share of its prefill rate that a replica gets first.
INITIAL_SHARE = 0.1
#: Factor by which the share grows each second.
GROWTH_PER_SECOND = 1.5
#: Seconds until a replica gets its full share.
SLOW_START_SECONDS = math.log(1 / INITIAL_SHARE) / math.log(GROWTH_PER_SECOND)


class SlowStart:
    """The replicas that became ready recently, and the prompt tokens they were sent since."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._sent_tokens: dict[str, float] = {}
        self._ready: set[str] | None = None

    def update_views(self, views: Sequence[ReplicaView], now: float) -> None:
        """Start replicas that became ready.

        Those that are ready in the first call were ready before this gateway.
        """
        ready = {view.replica_id for view in views if view.state == "ready"}
        if self._ready is not None:
            for name in ready - self._ready:
                self._started[name], self._sent_tokens[name] = now, 0.0
        self._ready = ready

    def allows(self, view: ReplicaView, now: float) -> bool:
        """Return True if the replica was sent fewer tokens than its growing share allows until now."""
        started = self._started.get(view.replica_id)
        if started is None:
            return True
        elapsed = now - started
        if not 0 <= elapsed < SLOW_START_SECONDS:
            del self._started[view.replica_id], self._sent_tokens[view.replica_id]
            return True
        # ∫ INITIAL_SHARE · GROWTH_PER_SECOND^t dt
        share = INITIAL_SHARE * (math.pow(GROWTH_PER_SECOND, elapsed) - 1) / math.log(GROWTH_PER_SECOND)
        return self._sent_tokens[view.replica_id] <= share * (view.prefill_rate or DEFAULT_PREFILL_RATE)

    def record_sent(self, view: ReplicaView, tokens: float) -> None:
        if view.replica_id in self._started:
            self._sent_tokens[view.replica_id] += tokens
