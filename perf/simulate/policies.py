"""Routing policies of the simulator: the gateway's own, and common alternatives for comparison."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence

from llmops.gateway.interfaces import ReplicaView, RoutingPolicy, RoutingRequest
from llmops.gateway.routing.cost_model import can_serve
from llmops.gateway.routing.placement.least_cost import LeastCostPolicy
from llmops.gateway.routing.placement.prefix_index import PrefixIndex


class CacheBlindPolicy(RoutingPolicy):
    """A base class of policies that do not know what the replicas have cached."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, views: Sequence[ReplicaView]) -> int | None:
        places = [at for at, view in enumerate(views) if view.state == "ready" and can_serve(view, request)]
        return self._of(request, places, views) if places else None

    @abstractmethod
    def _of(self, request: RoutingRequest, places: list[int], views: Sequence[ReplicaView]) -> int: ...

    def cached(self, request: RoutingRequest, view: ReplicaView) -> int:
        return 0


class LeastLoaded(CacheBlindPolicy):
    """A policy that chooses the lowest waiting × 4 + running, a common recommendation."""

    def _of(self, request: RoutingRequest, places: list[int], views: Sequence[ReplicaView]) -> int:
        return min(places, key=lambda at: (_load(views[at]), self._rng.random()))


class PrefixAffinity(CacheBlindPolicy):
    """A policy that sends equal beginnings of prompts to the same replica, regardless of its load."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._places: dict[int, str] = {}

    def _of(self, request: RoutingRequest, places: list[int], views: Sequence[ReplicaView]) -> int:
        first = request.hashes[0] if request.hashes else self._rng.getrandbits(64)
        known = self._places.get(first)
        index = next((at for at in places if views[at].replica_id == known), None)
        if index is None:
            index = self._rng.choice(places)
            self._places[first] = views[index].replica_id
        return index


def _load(view: ReplicaView) -> int:
    return 4 * (view.waiting + view.in_flight) + view.running


POLICIES: dict[str, Callable[[random.Random], RoutingPolicy]] = {
    "cheapest": lambda rng: LeastCostPolicy(PrefixIndex(), rng),
    "least-loaded": LeastLoaded,
    "affinity": PrefixAffinity,
}
