"""The replica on which a request has its first token soonest."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

from llmops.gateway.interfaces import ReplicaState, ReplicaView, RoutingRequest
from llmops.gateway.routing.cost_model import can_serve, decode_weight, kv_cache_load, occupancy, routing_cost
from llmops.gateway.routing.placement.prefix_index import CachedPrefix, PrefixIndex
from llmops.kv_blocks import block_hashes

# The share of a KV cache above which a replica gets nothing while another is below.
KV_CACHE_WATERMARK = 0.9
# How full the others must be for spare replicas to be used.
SPARE_THRESHOLD = 0.8
# Up to so many replicas all are compared; of more, those that hold most of the prefix and two drawn at random.
MAX_COMPARED_REPLICAS, MAX_PREFIX_HOLDERS = 8, 4
# A replica that costs less than this much more is as good: the first of the candidates wins, not chance.
TIE_TOLERANCE = 1e-9


class LeastCostPolicy:
    """The Policy of a gateway. The guard against hot spots is the cost itself: a queue there outweighs a hit."""

    def __init__(self, index: PrefixIndex | None = None, rng: random.Random | None = None) -> None:
        """Without an index nothing is known of prefixes, and nothing is hashed."""
        self.index = index
        self._rng = rng or random.Random()
        self._hashed: tuple[RoutingRequest | None, int, Sequence[int]] = (None, 0, [])
        self._found: tuple[RoutingRequest | None, Sequence[CachedPrefix]] = (None, ())

    def choose(self, wanted: RoutingRequest, views: Sequence[ReplicaView], now: float) -> int | None:
        places = _eligible_replicas(wanted, views)
        if len(places) < 2:
            return places[0] if places else None
        known: dict[str, int] = {}
        first: list[int] = []
        if self.index is not None:
            hashes = self.hashes(wanted, views[places[0]].tokens_per_block)
            held = self.index.held(hashes)
            self._found = (wanted, held)
            known = {name: blocks for blocks, bits in held for name in self.index.names(bits)}
            first = _prefix_candidates(hashes, known, places, views)
        candidates = [*dict.fromkeys((*first, *self._drawn(places)))]
        best = self._cheapest(wanted, views, candidates, known)
        if best is None and len(places) > len(candidates):
            best = self._cheapest(wanted, views, places, known)
        return min(candidates, key=lambda place: kv_cache_load(views[place])) if best is None else best

    def sent(self, wanted: RoutingRequest, view: ReplicaView) -> None:
        if self.index is not None:
            size = view.tokens_per_block
            known = self.cached(wanted, view) // size
            self._found = (None, ())
            hashes = self.hashes(wanted, size)
            self.index.store(view.replica_id, hashes if self.index.has_limit(view.replica_id) else hashes[known:])

    def stored(self, replica_id: str, hashes: Sequence[int]) -> None:
        if self.index is not None:
            self.index.store(replica_id, hashes)

    def removed(self, replica_id: str, hashes: Sequence[int]) -> None:
        if self.index is not None:
            self._found = (None, ())
            self.index.remove(replica_id, hashes)

    def limit(self, replica_id: str, blocks: int) -> None:
        if self.index is not None:
            self._found = (None, ())
            self.index.limit(replica_id, blocks)

    def forget(self, replica_id: str) -> None:
        if self.index is not None:
            self._found = (None, ())
            self.index.forget(replica_id)

    def hashes(self, wanted: RoutingRequest, tokens_per_block: int) -> Sequence[int]:
        """Of the prompt's blocks; those of the last request are kept, as it is asked for again when it is sent."""
        if wanted.hashes is not None:
            return wanted.hashes
        last, size, hashes = self._hashed
        if last is wanted and size == tokens_per_block:
            return hashes
        hashes = block_hashes(wanted.ids, tokens_per_block, wanted.salt)
        self._hashed = (wanted, tokens_per_block, hashes)
        return hashes

    def cached(self, wanted: RoutingRequest, view: ReplicaView) -> int:
        """Tokens of the prompt that the replica is thought to have cached."""
        if self.index is None:
            return 0
        last, held = self._found
        if last is not wanted:
            held = self.index.held(self.hashes(wanted, view.tokens_per_block))
            self._found = (wanted, held)
        return _cached_blocks(held, self.index.bit(view.replica_id)) * view.tokens_per_block

    def _drawn(self, places: list[int]) -> list[int]:
        """Two at random. Of few replicas all, beginning anywhere: else the first would win every tie."""
        count = len(places)
        start = int(self._rng.random() * count)
        if count <= MAX_COMPARED_REPLICAS:
            return places[start:] + places[:start]
        return [places[start], places[(start + 1 + int(self._rng.random() * (count - 1))) % count]]

    def _cheapest(
        self, wanted: RoutingRequest, views: Sequence[ReplicaView], candidates: Sequence[int], known: Mapping[str, int]
    ) -> int | None:
        """The best candidate of those under the watermark; None when there is none."""
        tokens, answer, best, below = wanted.tokens, wanted.answer, None, float("inf")
        size = views[0].tokens_per_block
        loads = [kv_cache_load(views[place]) for place in candidates]
        weight = decode_weight(sum(loads) / len(loads))
        for at, place in enumerate(candidates):
            view = views[place]
            new = tokens - known.get(view.replica_id, 0) * size
            # the last token is always read: its logits are the answer's first
            uncached = new if new > 0 else 1
            seconds = routing_cost(view, uncached, answer, weight, loads[at], below)
            if seconds < below and kv_cache_load(view, uncached) <= KV_CACHE_WATERMARK:
                best, below = place, seconds - TIE_TOLERANCE
        return best


def _eligible_replicas(wanted: RoutingRequest, views: Sequence[ReplicaView]) -> list[int]:
    """Where it may go at all: ready ones with its adapter and version; spare ones too when those are full; suspects
    when there is nothing else."""
    places = _in_state("ready", wanted, views)
    if len(places) < len(views):
        spare = _in_state("spare", wanted, views)
        if spare and _are_full([views[at] for at in places]):
            places += spare
    return places or _in_state("suspect", wanted, views)


def _in_state(state: ReplicaState, wanted: RoutingRequest, views: Sequence[ReplicaView]) -> list[int]:
    if wanted.version or wanted.adapter or wanted.without:
        return [at for at, view in enumerate(views) if view.state == state and can_serve(view, wanted)]
    return [at for at, view in enumerate(views) if view.state == state and view.weight > 0]


def _are_full(views: Sequence[ReplicaView]) -> bool:
    return sum(map(occupancy, views)) >= SPARE_THRESHOLD * len(views)


def _prefix_candidates(
    hashes: Sequence[int], known: Mapping[str, int], places: Sequence[int], views: Sequence[ReplicaView]
) -> list[int]:
    """Holders of the prefix, the longest first, and the choice that all gateways have for what is new of it."""
    if not hashes:
        return []
    new = next(iter(known.values()), 0)
    favourite = _rendezvous_choice(hashes[min(new, len(hashes) - 1)], places, views)
    return [*_prefix_holders(known, places, views), favourite]


def _prefix_holders(known: Mapping[str, int], places: Sequence[int], views: Sequence[ReplicaView]) -> list[int]:
    """Those that hold most of a prefix; of many that hold the same those with most room, as the first by number would
    get everything. (Of few replicas all are compared.)"""
    holders = [(-known[view.replica_id], place) for place in places if (view := views[place]).replica_id in known]
    holders.sort()
    if len(holders) > MAX_PREFIX_HOLDERS and len(places) > MAX_COMPARED_REPLICAS:
        last = holders[MAX_PREFIX_HOLDERS - 1][0]
        alike = [place for blocks, place in holders if blocks == last]
        alike.sort(key=lambda place: occupancy(views[place]))
        return [*(place for blocks, place in holders if blocks < last), *alike][:MAX_PREFIX_HOLDERS]
    return [place for _, place in holders]


def _rendezvous_choice(name: int, places: Sequence[int], views: Sequence[ReplicaView]) -> int:
    """Rendezvous hashing: every gateway has the same for a name, and when a replica leaves, only its own move."""
    scores = [xxh3_64_intdigest(views[place].replica_id.encode(), name) for place in places]
    return places[scores.index(max(scores))]


def _cached_blocks(held: Sequence[CachedPrefix], bit: int) -> int:
    for blocks, bits in held:
        if bits & bit:
            return blocks
    return 0
