"""When a request goes to a replica, and who is told at once to come back later. Pure: whoever asks brings the time.

Requests wait here and not in the engines, so that whichever replica has room first gets the one that is next. A replica
has room while little is queued there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmops.gateway.interfaces import QueuedRequest, ReplicaCapacity, ReplicaView, RoutingPolicy
from llmops.gateway.routing.admission.fair_queue import expected_service_cost
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

# A retry-after is multiplied by a number between these, or all that were refused would come back at once.
RETRY_AFTER_JITTER = (0.8, 1.2)
# Seconds over which the mean of a replica's steps is taken.
STEP_TIME_WINDOW = 4.0
# A step counts for no more than this (s): those that read much are long, and would let in even more.
MAX_COUNTED_STEP = 0.05
# To wait for what is cached is worth this part of the time in which it could be read again: more of it costs those who
# wait more than it spares the engines (docs/decisions/0017).
HOME_WAIT_FACTOR = 0.25
# The last of a replica's places, of all, which are left to those who have less than their part.
RESERVED_SLOT_SHARE = 1 / 16
# The share of the newest in the mean length of answers.
OUTPUT_LENGTH_SMOOTHING = 0.02


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`entries` and `bytes` that may wait; `steps` of an engine whose worth may be queued in it: it reads half of what
    it calls queued in the step that has begun meanwhile; the shares of its KV cache up to which requests are sent
    (`watermark`) and above which one is taken back (`preempt`); `tpot`: seconds of its mean step above which it gets no
    more, as those that run would be too slow.
    """

    entries: int = 4096
    bytes: int = 256 * 2**20
    steps: float = 4.0
    watermark: float = 0.9
    preempt: float = 0.95
    tpot: float = float("inf")


class Assignment(NamedTuple):
    """A ticket goes to the view of this index."""

    ticket: QueuedRequest
    place: int


class AdmissionController:
    """Of one model. What is placed is noted in its view (`unseen`) and with the policy."""

    def __init__(
        self,
        order: TieredQueue,
        policy: RoutingPolicy,
        bounds: AdmissionLimits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.order, self.policy, self.bounds = order, policy, bounds or AdmissionLimits()
        self._rng = rng or random.Random()
        self._drain, self._ramps, self._parts = QueueThroughput(), SlowStart(), TenantShares(order.rank)
        # when a replica was this gateway's turn, of several that share it
        self._turns: dict[str, tuple[int, bool]] = {}
        self._answer = 0.0
        self._paces: dict[str, tuple[float, float]] = {}

    def look(self, views: Sequence[ReplicaView], now: float) -> None:
        """Replicas came, went, or changed their state."""
        self._ramps.look(views, now)
        if len(self._paces) > 2 * len(views) + 16:
            self._paces.clear()

    def at_once(self, ticket: QueuedRequest, views: Sequence[ReplicaView], now: float) -> int | None:
        """Where it goes if nobody waits and its best replica has room. Otherwise it has its `home` then, if there is a
        replica for it at all."""
        place = self.policy.choose(ticket.wanted, views, now)
        if place is None:
            return None
        view = views[place]
        ticket.home = view.replica_id
        if self.order.size or not self._has_room(view, ticket.weight, now) or ticket.size > self.kv_room(view):
            return None
        if self._is_last(view) and self._parts.leaves(ticket):
            return None
        self.order.take(ticket)
        self._send(ticket, view)
        return place

    def refusal(self, ticket: QueuedRequest, views: Sequence[ReplicaView], now: float) -> float | None:
        """How long it would wait (s), if that is too long for its tier or its deadline."""
        if not self.order.ahead(ticket) and any(self._is_open_to(ticket, view, now) for view in views):
            # only those wait before whom it comes, and who leave that place to it
            return None
        wait = self.wait(ticket, views)
        return wait if wait > self.limit(ticket, now) else None

    def limit(self, ticket: QueuedRequest, now: float) -> float:
        """Seconds from now that it may wait: for its first token or, once it is in the queue, until it goes. What began
        elsewhere is never refused."""
        if ticket.moved:
            return float("inf")
        return min(ticket.arrived + self.order.tier(ticket).max_wait, ticket.deadline) - now

    def wait(self, ticket: QueuedRequest, views: Sequence[ReplicaView]) -> float:
        """Predicted seconds until its first token, there being no room now: until what is before it and then itself
        have left the queue, to whichever replica, and until its prompt is read where it is read soonest."""
        left = (self.order.ahead(ticket) + expected_service_cost(ticket)) / self._drain.rate(views)
        home = next((view for view in views if view.replica_id == ticket.home), None)
        if home is None:
            return left
        return left + time_to_first_token(home, uncached_tokens(self.policy, ticket.wanted, home), 0)

    def queued(self, ticket: QueuedRequest, views: Sequence[ReplicaView]) -> float:
        """The part of `wait` that nothing has to be known for but who asks."""
        ahead = self.order.ahead(ticket)
        return ahead / self._drain.rate(views) if ahead else 0.0

    def retry_after(self, wait: float) -> float:
        """What somebody is told who would have waited so long."""
        return wait * self._rng.uniform(*RETRY_AFTER_JITTER)

    def push(self, ticket: QueuedRequest, views: Sequence[ReplicaView], now: float) -> list[QueuedRequest]:
        """Let it wait. Those who lose their place to it, or it itself, are returned."""
        home = next((view for view in views if view.replica_id == ticket.home), None)
        if home is not None:
            cached = self.policy.cached(ticket.wanted, home)
            ticket.stays = now + HOME_WAIT_FACTOR * cached / (home.prefill_rate or DEFAULT_PREFILL_RATE)
            # it must go while there is time to read it
            reading = time_to_first_token(home, max(ticket.wanted.tokens - cached, 1), 0)
            ticket.deadline = min(ticket.deadline, ticket.arrived + self.order.tier(ticket).max_wait) - reading
        out: list[QueuedRequest] = []
        while self._is_full(ticket):
            last = self.order.last_for(ticket) if self.order else None
            if last is None:
                return [*out, ticket]
            self.order.remove(last)
            out.append(last)
        self.order.push(ticket)
        self._drain.backlog(True, now)
        return out

    def remove(self, ticket: QueuedRequest, now: float) -> bool:
        """It waits no longer. False when it did not."""
        known = self.order.remove(ticket)
        self._drain.backlog(bool(self.order), now)
        return known

    def next(self, views: Sequence[ReplicaView], now: float) -> Assignment | None:
        """One of those who wait, if there is room for it; to be asked until there is none."""
        if not self.order.size:
            return None
        places = [place for place, view in enumerate(views) if self._is_open(view, now)]
        places = _usable_replicas(places, views)
        reserved = self._reserved(views)
        for place in sorted(places, key=lambda place: occupancy(views[place])):
            view = views[place]
            ticket = self._held(view) if place == reserved else self._pop(view, now)
            if ticket is not None:
                self._drain.left(expected_service_cost(ticket))
                self._drain.backlog(bool(self.order), now)
                self._send(ticket, view)
                return Assignment(ticket, place)
        return None

    def victim(self, view: ReplicaView, running: Iterable[QueuedRequest]) -> QueuedRequest | None:
        """Who is taken back from a replica whose KV cache is full: of the lowest tier the youngest, where one of a
        higher tier runs beside it."""
        if kv_cache_load(view) <= self.bounds.preempt:
            return None
        ranked = [(self.order.rank(ticket), ticket.arrived, at, ticket) for at, ticket in enumerate(running)]
        if not ranked or max(ranked)[0] == min(ranked)[0]:
            return None
        return max(ranked)[3]

    def unsent(self, ticket: QueuedRequest, view: ReplicaView) -> None:
        """It was placed and did not go: nothing of it is charged."""
        self._parts.gave(ticket)
        view.unseen = max(view.unseen - 1, 0)
        view.in_flight_tokens = max(view.in_flight_tokens - ticket.uncached, 0)
        self.order.served(ticket, -ticket.wanted.tokens, -ticket.wanted.answer)

    def ended(self, ticket: QueuedRequest, answer: int) -> None:
        """Its answer had so many tokens: what it was charged is put right."""
        self._parts.gave(ticket)
        self.order.served(ticket, 0, answer - ticket.wanted.answer)
        self._answer += OUTPUT_LENGTH_SMOOTHING * (answer - self._answer) if self._answer else answer

    def kv_room(self, view: ReplicaView) -> float:
        """Tokens that may be sent there: those that run will need about half an answer more each."""
        count = view.running + view.waiting + view.unseen
        if not view.blocks or not count:
            # what does not fit an empty replica fits none
            return float("inf")
        free = view.free_blocks - (1 - self.bounds.watermark) * view.blocks
        return free * view.tokens_per_block - view.waiting_tokens - view.in_flight_tokens - count * self._answer / 2

    def _is_full(self, ticket: QueuedRequest) -> bool:
        return len(self.order) >= self.bounds.entries or self.order.bytes + ticket.bytes > self.bounds.bytes

    def _is_open(self, view: ReplicaView, now: float) -> bool:
        return view.state in ("ready", "spare", "suspect") and self._has_room(view, 0.0, now)

    def _is_open_to(self, ticket: QueuedRequest, view: ReplicaView, now: float) -> bool:
        if not self._is_open(view, now) or not can_serve(view, ticket.wanted) or ticket.size > self.kv_room(view):
            return False
        return not (self._is_last(view) and self._parts.leaves(ticket))

    def _has_room(self, view: ReplicaView, weight: float, now: float) -> bool:
        if view.running and self.bounds.tpot < math.inf and self._pace(view, now) > self.bounds.tpot:
            return False
        worth = self.bounds.steps * _capped_step_seconds(view) * (view.prefill_rate or DEFAULT_PREFILL_RATE)
        if view.waiting_tokens + view.in_flight_tokens >= worth:
            return False
        if view.max_batch_size and view.running + view.waiting + view.unseen >= view.max_batch_size:
            return False
        return self._ramps.allows(view, now) and (not view.demand or self._is_my_turn(view, weight, now))

    def _is_last(self, view: ReplicaView) -> bool:
        """Whether only the last of its places are free."""
        size = view.max_batch_size
        return size > 0 and view.running + view.waiting + view.unseen >= size - round(RESERVED_SLOT_SHARE * size)

    def _pace(self, view: ReplicaView, now: float) -> float:
        """The mean of a replica's steps over the last seconds: an answer feels that, and not a single long prompt."""
        since, mean = self._paces.get(view.replica_id, (now, view.step_seconds))
        mean += (view.step_seconds - mean) * (1 - math.exp(-max(now - since, 0.0) / STEP_TIME_WINDOW))
        self._paces[view.replica_id] = (now, mean)
        return mean

    def _is_my_turn(self, view: ReplicaView, weight: float, now: float) -> bool:
        """Of gateways that share a replica each gets as many of its steps as its demand is of all."""
        own = self.order.demand() or weight
        total = view.demand if self.order else view.demand + weight
        if own >= total or not (view.running or view.waiting):
            return True
        step = int(now / _capped_step_seconds(view))
        last, mine = self._turns.get(view.replica_id, (-1, False))
        if last != step:
            mine = self._rng.random() < own / total
            self._turns[view.replica_id] = (step, mine)
        return mine

    def _reserved(self, views: Sequence[ReplicaView]) -> int | None:
        """The replica that is kept for who has waited for room too long: the one with the most."""
        if self.order.held is None:
            return None
        ready = [
            place
            for place, view in enumerate(views)
            if view.state == "ready" and can_serve(view, self.order.held.wanted)
        ]
        return max(ready, key=lambda place: self.kv_room(views[place]), default=None)

    def _held(self, view: ReplicaView) -> QueuedRequest | None:
        held = self.order.held
        if held is None or held.size > self.kv_room(view):
            return None
        self.order.remove(held)
        self.order.take(held)
        return held

    def _pop(self, view: ReplicaView, now: float) -> QueuedRequest | None:
        leaves = self._parts.leaves if self._is_last(view) else None
        room = ReplicaCapacity(
            self.kv_room(view), view.replica_id, lambda ticket: can_serve(view, ticket.wanted), leaves
        )
        return self.order.pop(room, now)

    def _send(self, ticket: QueuedRequest, view: ReplicaView) -> None:
        ticket.uncached = uncached_tokens(self.policy, ticket.wanted, view)
        view.unseen += 1
        view.in_flight_tokens += ticket.uncached
        self._ramps.sent(view, ticket.uncached)
        self._parts.took(ticket)
        self.policy.sent(ticket.wanted, view)


def _capped_step_seconds(view: ReplicaView) -> float:
    """Seconds of its steps, as far as they count."""
    seconds = view.step_seconds or DEFAULT_STEP_SECONDS
    return seconds if seconds < MAX_COUNTED_STEP else MAX_COUNTED_STEP


def _usable_replicas(places: Sequence[int], views: Sequence[ReplicaView]) -> list[int]:
    """Ready ones; spare ones where no ready one has room; suspects when there is nothing else at all."""
    for state in ("ready", "spare"):
        some = [place for place in places if views[place].state == state]
        if some:
            return some
    return [] if any(view.state == "ready" for view in views) else list(places)
