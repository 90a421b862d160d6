"""Ways to choose a replica: the gateway's own, and what is often done instead, to be compared with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from llmops.gateway.fleet.cost import occupancy, takes
from llmops.gateway.fleet.routing.choose import Cheapest
from llmops.gateway.fleet.routing.prefix import PrefixIndex
from llmops.gateway.messages import Policy, ReplicaView, Wanted


class Blind:
    """Knows nothing of caches."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, wanted: Wanted, views: Sequence[ReplicaView], now: float) -> int | None:
        places = [at for at, view in enumerate(views) if view.state == "ready" and takes(view, wanted)]
        return self._of(wanted, places, views) if places else None

    def _of(self, wanted: Wanted, places: list[int], views: Sequence[ReplicaView]) -> int:
        return self._rng.choice(places)

    def cached(self, wanted: Wanted, view: ReplicaView) -> int:
        return 0

    def sent(self, wanted: Wanted, view: ReplicaView) -> None: ...

    def stored(self, replica_id: str, hashes: Sequence[int]) -> None: ...

    def removed(self, replica_id: str, hashes: Sequence[int]) -> None: ...

    def limit(self, replica_id: str, blocks: int) -> None: ...

    def forget(self, replica_id: str) -> None: ...


class LeastLoaded(Blind):
    """waiting × 4 + running, as is often recommended."""

    def _of(self, wanted: Wanted, places: list[int], views: Sequence[ReplicaView]) -> int:
        return min(places, key=lambda at: (_load(views[at]), self._rng.random()))


class TwoByLot(Blind):
    """The emptier one of two drawn by lot."""

    def _of(self, wanted: Wanted, places: list[int], views: Sequence[ReplicaView]) -> int:
        return min(self._rng.choices(places, k=2), key=lambda at: occupancy(views[at]))


class Affinity(Blind):
    """Always where the prompt's beginning went first, whatever waits there."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._places: dict[int, str] = {}

    def _of(self, wanted: Wanted, places: list[int], views: Sequence[ReplicaView]) -> int:
        first = wanted.hashes[0] if wanted.hashes else self._rng.getrandbits(64)
        known = self._places.get(first)
        place = next((at for at in places if views[at].replica_id == known), None)
        if place is None:
            place = self._rng.choice(places)
            self._places[first] = views[place].replica_id
        return place


def _load(view: ReplicaView) -> int:
    return 4 * (view.waiting + view.unseen) + view.running


POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "cheapest": lambda rng: Cheapest(PrefixIndex(), rng),
    "least-loaded": LeastLoaded,
    "two-by-lot": TwoByLot,
    "affinity": Affinity,
    "random": Blind,
}
