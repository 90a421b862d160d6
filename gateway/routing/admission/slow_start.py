"""Slow start: a limit on the prompt tokens sent to a replica that has just become ready.

The caches of such a replica are still empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmops.gateway.interfaces import ReplicaView
from llmops.gateway.routing.admission.wait_prediction import THROUGHPUT_TIME_CONSTANT
from llmops.gateway.routing.cost_model import DEFAULT_PREFILL_RATE

#: Share of its prefill rate that a replica gets when it becomes ready. Small, because the replica's
#: caches are empty.
INITIAL_SHARE = 0.1
#: Factor by which a replica's share of its prefill rate grows each second, so that the share is
#: full after about 6 s.
GROWTH_PER_SECOND = 1.5
#: Seconds until a replica gets its full prefill rate: the time in which INITIAL_SHARE grows to 1 by
#: GROWTH_PER_SECOND.
SLOW_START_SECONDS = math.log(1 / INITIAL_SHARE) / math.log(GROWTH_PER_SECOND)


class SlowStart:
    """The replicas that became ready recently, and the prompt tokens sent to each since."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        # latest start of each ready replica, kept after its slow start for `growth`
        self._started_last: dict[str, float] = {}
        self._sent_tokens: dict[str, float] = {}
        self._ready: set[str] | None = None

    def update_views(self, views: Sequence[ReplicaView], now: float) -> None:
        """Begin the slow start of replicas that became ready.

        Replicas that are ready in the first call are skipped: they were ready before this gateway
        started.
        """
        ready = {view.replica_id for view in views if view.state == "ready"}
        if self._ready is not None:
            for name in ready - self._ready:
                self._started[name], self._sent_tokens[name] = now, 0.0
                self._started_last[name] = now
            self._started_last = {name: at for name, at in self._started_last.items() if name in ready}
        self._ready = ready

    def growth(self, now: float) -> float:
        """Return the full share of the replicas divided by their mean share in the past.

        The weight of the past falls with THROUGHPUT_TIME_CONSTANT, like the weight of observations
        in QueueThroughput. The result is 1 unless all replicas became ready recently.
        """
        ready = self._ready or ()
        elapsed = now - max((self._started_last.get(name, -math.inf) for name in ready), default=-math.inf)
        if not 0 <= elapsed < SLOW_START_SECONDS + 4 * THROUGHPUT_TIME_CONSTANT or any(
            name not in self._started_last for name in ready
        ):
            return 1.0
        constant, ramp = THROUGHPUT_TIME_CONSTANT, min(elapsed, SLOW_START_SECONDS)
        # ∫ share(t) · e^((t - elapsed) / constant) dt over the slow start, and over the time after
        # it
        exponent = math.log(GROWTH_PER_SECOND) + 1 / constant
        served = INITIAL_SHARE * math.expm1(exponent * ramp) / exponent * math.exp(-elapsed / constant)
        served -= constant * math.expm1((ramp - elapsed) / constant)
        possible = -constant * math.expm1(-max(elapsed, 0.1) / constant)
        return max(possible / max(served, INITIAL_SHARE * possible), 1.0)

    def allows(self, view: ReplicaView, now: float) -> bool:
        """Return True unless a replica in its slow start has got its share of tokens so far.

        The share of tokens grows until the slow start ends.
        """
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
