"""The decisions when a request is dispatched to a replica and when it is rejected.

The code is pure: callers pass the time. Requests wait in the gateway and not in the engines, so
that the next request goes to the first replica that has room. A replica has room while little work
is queued in its engine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmops.gateway.interfaces import QueuedRequest, ReplicaCapacity, ReplicaView, RoutingPolicy
from llmops.gateway.routing.admission.fair_queue import expected_service_cost
from llmops.gateway.routing.admission.rejected_clients import RejectedClients, spread_retry_after
from llmops.gateway.routing.admission.slow_start import SlowStart
from llmops.gateway.routing.admission.tenant_shares import TenantShares
from llmops.gateway.routing.admission.tiered_queue import TieredQueue
from llmops.gateway.routing.admission.wait_prediction import QueueThroughput
from llmops.gateway.routing.cost_model import (
    DEFAULT_PREFILL_RATE,
    DEFAULT_STEP_SECONDS,
    can_serve,
    kv_cache_load,
    occupancy,
    time_to_first_token,
    uncached_tokens,
)

#: Time constant of the mean of a replica's step time, in seconds: long enough that a single long
#: prompt hardly changes the mean. With the mean of the last steps alone, 6 to 15 % fewer requests of
#: the overloaded fleet in docs/scale.md meet their objectives if requests wait at most 500 ms.
STEP_TIME_WINDOW = 4.0
#: Seconds for which the first step time of a replica counts in the mean. Short, because the first
#: step reads a prompt.
FIRST_SAMPLE_SECONDS = 0.5
#: Weight of the first step time of a replica in the mean, which follows from FIRST_SAMPLE_SECONDS.
FIRST_SAMPLE_SHARE = 1 - math.exp(-FIRST_SAMPLE_SECONDS / STEP_TIME_WINDOW)
#: Maximum seconds for which a step time counts in the mean. If it is older, the replica may have
#: been idle before.
MAX_SAMPLE_AGE = 1.0
#: Maximum seconds assumed for a step when prefill is admitted by steps. Steps with much prefill are
#: long, and would admit even more prefill.
MAX_COUNTED_STEP = 0.05
#: Share of a replica's slots that is reserved for tenants below their equal share, so that such a
#: tenant finds a free slot.
RESERVED_SLOT_SHARE = 1 / 16
#: Maximum wait, in seconds, of tiers whose clients wait for the answer. Tiers that may wait longer
#: have a backlog by design.
MAX_ATTENDED_WAIT = 60.0
#: Minimum Retry-After in seconds, before it is spread. If a wait is limited to less than a second,
#: clients would otherwise return several times a second, and each rejection costs about 2 ms.
MIN_RETRY_AFTER = 1.0
#: Weight of the newest answer in the mean output length, which covers about the last 50 answers.
OUTPUT_LENGTH_SMOOTHING = 0.02


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The limits of one model's queue and of its replicas.

    Attributes:
        entries: Maximum number of waiting requests.
        bytes: Maximum number of bytes that the waiting requests hold.
        steps: Maximum prefill queued in an engine, in steps. Half of the prefill that an engine
            reports no longer waits, because this half is part of the step that began since the
            report.
        watermark: Share of the KV cache up to which requests are dispatched.
        preempt: Share of the KV cache above which a request is preempted.
        tpot: Mean step time in seconds above which a replica gets no further requests.
    """

    entries: int = 4096
    bytes: int = 256 * 2**20
    steps: float = 4.0
    watermark: float = 0.9
    preempt: float = 0.95
    tpot: float = float("inf")


class Assignment(NamedTuple):
    """A request, and the index of the replica to which it is dispatched."""

    request: QueuedRequest
    replica_index: int


class AdmissionController:
    """The admission control of one model.

    Dispatched requests are added to the view's in-flight counts and reported to the policy.
    """

    def __init__(
        self,
        queue: TieredQueue,
        policy: RoutingPolicy,
        limits: AdmissionLimits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.queue, self.policy, self.limits = queue, policy, limits or AdmissionLimits()
        self._rng = rng or random.Random()
        self._throughput, self._slow_start = QueueThroughput(), SlowStart()
        self._tenants = TenantShares(queue.rank)
        # Rejected clients of each tier, by the tier's rank.
        self._rejected = [RejectedClients() for _ in queue.waiting()]
        # For each replica shared with other gateways: the last step for which a turn was drawn, and
        # whether this gateway may dispatch in that step.
        self._turns: dict[str, tuple[int, bool]] = {}
        self._output_length = 0.0
        # For each replica: the time of its last update, its mean step time, and the share of the
        # mean's window that was observed.
        self._step_times: dict[str, tuple[float, float, float]] = {}

    def update_views(self, views: Sequence[ReplicaView], now: float) -> None:
        """Update the state for replicas that came, went or changed their state."""
        self._slow_start.update_views(views, now)
        if len(self._step_times) > 2 * len(views) + 16:
            self._step_times.clear()

    def try_dispatch(self, request: QueuedRequest, views: Sequence[ReplicaView], now: float) -> int | None:
        """Return the index of a replica if the request can be dispatched immediately, or None.

        For a request that cannot be dispatched, `request.home` is set to the best replica for the
        request, if one exists.
        """
        place = self.policy.choose(request.routing, views)
        if place is None:
            return None
        view = views[place]
        request.home = view.replica_id
        if self.queue.size or not self._has_room(view, request.weight, now) or request.size > self.kv_room(view):
            return None
        if self._has_reserved_slots_only(view) and self._tenants.must_yield(request):
            return None
        self.queue.take(request)
        self._dispatch(request, view)
        return place

    def excessive_wait(self, request: QueuedRequest, views: Sequence[ReplicaView], now: float) -> float | None:
        """Return the predicted wait in seconds if it exceeds the request's limit, or None."""
        free = sum(self._is_open_to(request, view, now) for view in views)
        if free and (len(self.queue) < free or not self.queue.ahead(request)):
            # The request overtakes all waiting requests: they wait for the replica with their
            # cached prefix, are of lower tiers, or leave this slot to the request.
            return None
        wait = self.predicted_wait(request, views)
        return wait if wait > self.max_wait(request, now) else None

    def max_wait(self, request: QueuedRequest, now: float) -> float:
        """Return the maximum remaining wait of a request in seconds.

        The limit applies to the first token before the request is queued, and to its dispatch
        afterwards. A request that failed over is never rejected.
        """
        if request.moved:
            return float("inf")
        return min(self.tier_deadline(request), request.deadline) - now

    def tier_deadline(self, request: QueuedRequest) -> float:
        """Return the latest time of a request's first token by the limit of its tier."""
        return request.arrived + self.queue.tier(request).max_wait

    def predicted_wait(self, request: QueuedRequest, views: Sequence[ReplicaView]) -> float:
        """Return the predicted seconds until the first token of a request that cannot start now.

        The prediction is the time until the request and all requests before it have left the queue,
        plus the prefill on the request's home replica.
        """
        wait = (self.queue.ahead(request) + expected_service_cost(request)) / self._throughput.rate(views)
        home = self._home(request, views)
        if home is None:
            return wait
        return wait + time_to_first_token(home, uncached_tokens(self.policy, request.routing, home), 0)

    def queue_wait(self, request: QueuedRequest, views: Sequence[ReplicaView]) -> float:
        """Return the seconds until the requests before this request have left the queue.

        The prompt of the request need not be known.
        """
        ahead = self.queue.ahead(request)
        return ahead / self._throughput.rate(views) if ahead else 0.0

    def saturation(self, views: Sequence[ReplicaView]) -> float:
        """Return the highest ratio of a tier's wait to the wait at which requests are rejected.

        Tiers whose limit exceeds MAX_ATTENDED_WAIT do not count: they have a backlog by design.
        """
        if not self.queue.size:
            return 0.0
        rate = self._throughput.rate(views)
        waits = ((tier.max_wait, cost / rate) for tier, cost in self.queue.backlogs())
        return max((wait / longest for longest, wait in waits if longest <= MAX_ATTENDED_WAIT), default=0.0)

    def retry_after(self, request: QueuedRequest, wait: float, views: Sequence[ReplicaView], now: float) -> float:
        """Return the Retry-After of a rejected request, and count its client as about to return.

        The measured throughput of the queue is raised while replicas start slowly, because more
        requests will leave the queue once the replicas get their full share.

        Args:
            request: The rejected request.
            wait: The predicted wait in seconds. The queue has room once the wait is within the
                request's limit.
            views: The replicas.
            now: The current time.

        Returns:
            The Retry-After in seconds.
        """
        growth = self._slow_start.growth(now)
        departures = growth * self._throughput.rate(views) / max(self.queue.mean_cost, 1.0)
        rank = self.queue.rank(request)
        away = sum(clients.count(request.tenant, now) for clients in self._rejected[: rank + 1])
        limit = min(self.queue.tier(request).max_wait, request.deadline - request.arrived)
        wait /= growth
        # At least half: requests are also rejected because they lose their place in a full queue,
        # or wait longer than was predicted.
        room = max(wait - limit, wait / 2, MIN_RETRY_AFTER)
        seconds = spread_retry_after(room, away, departures, self._rng)
        self._rejected[rank].add(request.tenant, now, seconds)
        return seconds

    def push(self, request: QueuedRequest, views: Sequence[ReplicaView], now: float) -> list[QueuedRequest]:
        """Queue a request, and return the requests that thereby lose their place.

        If the new request itself finds no place, it is the last of the returned requests.
        """
        home = self._home(request, views)
        if home is not None:
            cached, rate = self.policy.cached(request.routing, home), home.prefill_rate or DEFAULT_PREFILL_RATE
            # reserve the request for its home for the time that another replica would need to compute
            # the cached prefix (docs/decisions/0017)
            request.home_until = now + cached / rate
            # Subtract the duration of the request's own prefill, so that its first token still comes
            # before the deadline. The replica has no other prompt waiting when it gets the request.
            prefill = max(request.routing.tokens - cached, 1) / rate + (home.step_seconds or DEFAULT_STEP_SECONDS)
            request.deadline = min(request.deadline, self.tier_deadline(request)) - prefill
        evicted: list[QueuedRequest] = []
        while self._is_full(request):
            last = self.queue.eviction_candidate(request) if self.queue else None
            if last is None:
                return [*evicted, request]
            self.queue.remove(last)
            evicted.append(last)
        self.queue.push(request)
        self._throughput.update_backlog(True, now)
        return evicted

    def remove(self, request: QueuedRequest, now: float) -> bool:
        """Remove a request from the queue. Return False if it was not queued."""
        was_queued = self.queue.remove(request)
        self._throughput.update_backlog(bool(self.queue), now)
        return was_queued

    def dispatch_next(self, views: Sequence[ReplicaView], now: float) -> Assignment | None:
        """Dispatch one queued request if a replica has room for it, and return the assignment.

        Call again until the result is None.
        """
        if not self.queue.size:
            return None
        places = [place for place, view in enumerate(views) if self._is_open(view, now)]
        ready = [place for place in places if views[place].state == "ready"]
        if not ready and any(view.state == "ready" for view in views):
            # suspects get requests only if no replica is ready
            return None
        reserved = self._reserved_replica(views)
        for place in sorted(ready or places, key=lambda place: occupancy(views[place])):
            view = views[place]
            request = self._pop_reservation(view) if place == reserved else self._pop(view, now)
            if request is not None:
                self._throughput.record_departure(expected_service_cost(request))
                self._throughput.update_backlog(bool(self.queue), now)
                self._dispatch(request, view)
                return Assignment(request, place)
        return None

    def victim(self, view: ReplicaView, running: Iterable[QueuedRequest]) -> QueuedRequest | None:
        """Return the request to preempt on a replica whose KV cache is full, or None.

        The result is the youngest request of the lowest tier among the requests `running` on the
        replica, or None if all of them are of one tier.
        """
        if kv_cache_load(view) <= self.limits.preempt:
            return None
        ranked = [(self.queue.rank(request), request.arrived, at, request) for at, request in enumerate(running)]
        if not ranked or max(ranked)[0] == min(ranked)[0]:
            return None
        return max(ranked)[3]

    def undo_dispatch(self, request: QueuedRequest, view: ReplicaView) -> None:
        """Refund the charge of a request that was dispatched and never sent."""
        self._tenants.release(request)
        view.in_flight = max(view.in_flight - 1, 0)
        view.in_flight_tokens = max(view.in_flight_tokens - request.uncached_tokens, 0)
        self.queue.served(request, -request.routing.tokens, -request.routing.answer)

    def finish(self, request: QueuedRequest, output_tokens: int) -> None:
        """Correct the charge of a request that has ended after `output_tokens` tokens."""
        self._tenants.release(request)
        self.queue.served(request, 0, output_tokens - request.routing.answer)
        mean = self._output_length
        self._output_length = mean + OUTPUT_LENGTH_SMOOTHING * (output_tokens - mean) if mean else output_tokens

    def kv_room(self, view: ReplicaView) -> float:
        """Return the number of tokens for which a replica's cache has room.

        Each running sequence is assumed to need half of a mean answer more.
        """
        if not view.blocks or not view.sequences:
            # an empty replica admits any request: one that does not fit there fits no replica
            return float("inf")
        free_tokens = (view.free_blocks - (1 - self.limits.watermark) * view.blocks) * view.tokens_per_block
        growth = view.sequences * self._output_length / 2
        return free_tokens - view.waiting_tokens - view.in_flight_tokens - growth

    def _home(self, request: QueuedRequest, views: Sequence[ReplicaView]) -> ReplicaView | None:
        return next((view for view in views if view.replica_id == request.home), None)

    def _is_full(self, request: QueuedRequest) -> bool:
        return len(self.queue) >= self.limits.entries or self.queue.bytes + request.bytes > self.limits.bytes

    def _is_open(self, view: ReplicaView, now: float) -> bool:
        return view.state in ("ready", "suspect") and self._has_room(view, 0.0, now)

    def _is_open_to(self, request: QueuedRequest, view: ReplicaView, now: float) -> bool:
        if not self._is_open(view, now) or not can_serve(view, request.routing) or request.size > self.kv_room(view):
            return False
        return not (self._has_reserved_slots_only(view) and self._tenants.must_yield(request))

    def _has_room(self, view: ReplicaView, weight: float, now: float) -> bool:
        if view.running and self.limits.tpot < math.inf and self._mean_step_time(view, now) > self.limits.tpot:
            return False
        limit = self.limits.steps * _counted_step_time(view) * (view.prefill_rate or DEFAULT_PREFILL_RATE)
        if view.waiting_tokens + view.in_flight_tokens >= limit:
            return False
        if view.max_batch_size and view.running + view.waiting + view.in_flight >= view.max_batch_size:
            return False
        return self._slow_start.allows(view, now) and (not view.demand or self._is_my_turn(view, weight, now))

    def _has_reserved_slots_only(self, view: ReplicaView) -> bool:
        size = view.max_batch_size
        return size > 0 and view.sequences >= size - round(RESERVED_SLOT_SHARE * size)

    def _mean_step_time(self, view: ReplicaView, now: float) -> float:
        """Return the mean step time of a replica over about STEP_TIME_WINDOW seconds, in seconds.

        Clients notice the mean, and a single long prompt hardly changes it. The first observation
        counts for FIRST_SAMPLE_SECONDS only, because the first step of a replica reads a prompt,
        and would otherwise keep requests away from the replica for seconds.
        """
        updated, mean, seen = self._step_times.get(view.replica_id, (now, view.step_seconds, FIRST_SAMPLE_SHARE))
        passed = 1 - math.exp(-min(max(now - updated, 0.0), MAX_SAMPLE_AGE) / STEP_TIME_WINDOW)
        seen += passed * (1 - seen)
        mean += (view.step_seconds - mean) * passed / seen
        self._step_times[view.replica_id] = (now, mean, seen)
        return mean

    def _is_my_turn(self, view: ReplicaView, weight: float, now: float) -> bool:
        """Return True if this gateway may dispatch in the engine's current step.

        The result is drawn once per step. Gateways that share a replica get steps in proportion to
        the demand that they declare.

        Args:
            view: The replica.
            weight: The weight of a request that is not queued, used as this gateway's demand if no
                request waits. 0 to dispatch from the queue.
            now: The current time.
        """
        own = self.queue.demand() or weight
        total = view.demand if self.queue else view.demand + weight
        if own >= total or not (view.running or view.waiting):
            return True
        step = int(now / _counted_step_time(view))
        last_step, is_mine = self._turns.get(view.replica_id, (-1, False))
        if last_step != step:
            is_mine = self._rng.random() < own / total
            self._turns[view.replica_id] = (step, is_mine)
        return is_mine

    def _reserved_replica(self, views: Sequence[ReplicaView]) -> int | None:
        """Return the index of the replica to keep free for a request that waits for room, or None.

        The request is `queue.held`, which has waited too long. The replica is the one with the most
        room.
        """
        held = self.queue.held
        if held is None:
            return None
        ready = [at for at, view in enumerate(views) if view.state == "ready" and can_serve(view, held.routing)]
        return max(ready, key=lambda place: self.kv_room(views[place]), default=None)

    def _pop_reservation(self, view: ReplicaView) -> QueuedRequest | None:
        held = self.queue.held
        if held is None or held.size > self.kv_room(view):
            return None
        self.queue.remove(held)
        self.queue.take(held)
        return held

    def _pop(self, view: ReplicaView, now: float) -> QueuedRequest | None:
        capacity = ReplicaCapacity(
            tokens=self.kv_room(view),
            replica_id=view.replica_id,
            accepts=lambda request: can_serve(view, request.routing),
            must_yield=self._tenants.must_yield if self._has_reserved_slots_only(view) else None,
        )
        return self.queue.pop(capacity, now)

    def _dispatch(self, request: QueuedRequest, view: ReplicaView) -> None:
        request.uncached_tokens = uncached_tokens(self.policy, request.routing, view)
        view.in_flight += 1
        view.in_flight_tokens += request.uncached_tokens
        self._slow_start.record_sent(view, request.uncached_tokens)
        self._tenants.add(request)
        self.policy.sent(request.routing, view)


def _counted_step_time(view: ReplicaView) -> float:
    """Return the seconds of a step of the replica, at most MAX_COUNTED_STEP."""
    seconds = view.step_seconds or DEFAULT_STEP_SECONDS
    return seconds if seconds < MAX_COUNTED_STEP else MAX_COUNTED_STEP
