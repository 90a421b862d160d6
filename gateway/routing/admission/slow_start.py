"""A replica that comes back is not given everything at once: its caches are empty, and all have waited for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmops.gateway.interfaces import ReplicaView
from llmops.gateway.routing.cost_model import DEFAULT_PREFILL_RATE

# The share of what it can read with which it starts, and by what that grows each second.
INITIAL_SHARE, GROWTH_PER_SECOND = 0.1, 1.5
# Seconds after which it has all.
SLOW_START_SECONDS = math.log(1 / INITIAL_SHARE) / math.log(GROWTH_PER_SECOND)


class SlowStart:
    """Replicas that were away, and how much of each may be used by now."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._sent: dict[str, float] = {}
        self._ready: set[str] | None = None

    def look(self, views: Sequence[ReplicaView], now: float) -> None:
        """Who becomes ready begins; who is so at the first look was before this gateway came."""
        ready = {view.replica_id for view in views if view.state == "ready"}
        if self._ready is not None:
            for name in ready - self._ready:
                self._since[name], self._sent[name] = now, 0.0
        self._ready = ready

    def allows(self, view: ReplicaView, now: float) -> bool:
        """Whether it may be sent something: whether what it was sent is below what it may have had until now."""
        since = self._since.get(view.replica_id)
        if since is None:
            return True
        passed = now - since
        if not 0 <= passed < SLOW_START_SECONDS:
            del self._since[view.replica_id], self._sent[view.replica_id]
            return True
        # ∫ INITIAL_SHARE · GROWTH_PER_SECOND^t dt
        share = INITIAL_SHARE * (math.pow(GROWTH_PER_SECOND, passed) - 1) / math.log(GROWTH_PER_SECOND)
        return self._sent[view.replica_id] <= share * (view.prefill_rate or DEFAULT_PREFILL_RATE)

    def sent(self, view: ReplicaView, tokens: float) -> None:
        if view.replica_id in self._since:
            self._sent[view.replica_id] += tokens
