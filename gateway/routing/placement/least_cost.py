"""The routing policy, which chooses the replica with the lowest cost for a request."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

from llmops.gateway.interfaces import ReplicaState, ReplicaView, RoutingRequest
from llmops.gateway.routing.cost_model import can_serve, decode_weight, kv_cache_load, occupancy, routing_cost
from llmops.gateway.routing.placement.prefix_index import CachedPrefix, PrefixIndex
from llmops.kv_blocks import block_hashes

#: Share of a KV cache above which a replica gets no requests if another replica is below. The rest
#: of the cache is room in which running sequences grow.
KV_CACHE_WATERMARK = 0.9
#: Maximum number of replicas of which all are compared. In a larger fleet, only the holders of the
#: prefix and two random replicas are compared.
MAX_COMPARED_REPLICAS = 8
#: Maximum number of holders of the longest prefix that are compared, which bounds the time of a
#: choice.
MAX_PREFIX_HOLDERS = 4
#: Difference in cost up to which two candidates tie. The earlier candidate wins a tie, so that
#: noise does not decide.
TIE_TOLERANCE = 1e-9


class LeastCostPolicy:
    """The RoutingPolicy of a gateway.

    The cost also prevents hot spots, because a long queue outweighs a cache hit.
    """

    def __init__(self, index: PrefixIndex | None = None, rng: random.Random | None = None) -> None:
        """Create a policy. Without an `index`, prompts are not hashed and no prefixes are known."""
        self.index = index
        self._rng = rng or random.Random()
        # results for the latest request, which are needed again when the request is sent
        self._hashed: tuple[RoutingRequest | None, int, Sequence[int]] = (None, 0, [])
        self._found: tuple[RoutingRequest | None, Sequence[CachedPrefix]] = (None, ())

    def choose(self, request: RoutingRequest, views: Sequence[ReplicaView]) -> int | None:
        places = _in_state("ready", request, views) or _in_state("suspect", request, views)
        if len(places) < 2:
            return places[0] if places else None
        known: dict[str, int] = {}
        first: list[int] = []
        if self.index is not None:
            hashes = self.hashes(request, views[places[0]].tokens_per_block)
            held = self.index.held(hashes)
            self._found = (request, held)
            known = {name: blocks for blocks, bits in held for name in self.index.names(bits)}
            first = _prefix_candidates(hashes, known, places, views, request.affinity)
        candidates = [*dict.fromkeys((*first, *self._sample(places)))]
        best = self._cheapest(request, views, candidates, known)
        if best is None and len(places) > len(candidates):
            best = self._cheapest(request, views, places, known)
        return min(candidates, key=lambda place: kv_cache_load(views[place])) if best is None else best

    def sent(self, request: RoutingRequest, view: ReplicaView) -> None:
        if self.index is not None:
            size = view.tokens_per_block
            known = self.cached(request, view) // size
            self._found = (None, ())
            hashes = self.hashes(request, size)
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

    def hashes(self, request: RoutingRequest, tokens_per_block: int) -> Sequence[int]:
        """Return the hashes of the prompt's blocks."""
        if request.hashes is not None:
            return request.hashes
        last, size, hashes = self._hashed
        if last is request and size == tokens_per_block:
            return hashes
        hashes = block_hashes(request.ids, tokens_per_block, request.salt)
        self._hashed = (request, tokens_per_block, hashes)
        return hashes

    def cached(self, request: RoutingRequest, view: ReplicaView) -> int:
        if self.index is None:
            return 0
        last, held = self._found
        if last is not request:
            held = self.index.held(self.hashes(request, view.tokens_per_block))
            self._found = (request, held)
        return _cached_blocks(held, self.index.bit(view.replica_id)) * view.tokens_per_block

    def _sample(self, places: list[int]) -> list[int]:
        """Return two of `places` at random, or all of them in a random rotation if they are few.

        Without the random rotation, the first replica would win every tie.
        """
        count = len(places)
        start = int(self._rng.random() * count)
        if count <= MAX_COMPARED_REPLICAS:
            return places[start:] + places[:start]
        return [places[start], places[(start + 1 + int(self._rng.random() * (count - 1))) % count]]

    def _cheapest(
        self, request: RoutingRequest, views: Sequence[ReplicaView], candidates: Sequence[int], known: Mapping[str, int]
    ) -> int | None:
        """Return the cheapest candidate whose KV cache stays within KV_CACHE_WATERMARK, or None.

        Args:
            request: The request.
            views: The replicas.
            candidates: The indices in `views` of the replicas to compare.
            known: The number of the prompt's blocks that each replica holds, by replica id.
        """
        tokens, answer, best, below = request.tokens, request.answer, None, float("inf")
        size = views[0].tokens_per_block
        loads = [kv_cache_load(views[place]) for place in candidates]
        weight = decode_weight(sum(loads) / len(loads))
        for load, place in zip(loads, candidates, strict=True):
            view = views[place]
            new = tokens - known.get(view.replica_id, 0) * size
            # at least one token is computed: the logits of the last token are the first output
            uncached = new if new > 0 else 1
            seconds = routing_cost(view, uncached, answer, weight, load, below)
            if seconds < below and kv_cache_load(view, uncached) <= KV_CACHE_WATERMARK:
                best, below = place, seconds - TIE_TOLERANCE
        return best


def _in_state(state: ReplicaState, request: RoutingRequest, views: Sequence[ReplicaView]) -> list[int]:
    if request.adapter or request.without:
        return [at for at, view in enumerate(views) if view.state == state and can_serve(view, request)]
    return [at for at, view in enumerate(views) if view.state == state]


def _prefix_candidates(
    hashes: Sequence[int],
    known: Mapping[str, int],
    places: Sequence[int],
    views: Sequence[ReplicaView],
    affinity: int | None = None,
) -> list[int]:
    """Return the indices in `views` of the replicas to consider for a prompt.

    The holders of the prompt's prefix come in order of decreasing prefix length. Without an
    `affinity`, they are followed by the replica that all gateways choose for the first block that
    no replica holds. With an `affinity`, they follow the replica that all gateways choose for the
    affinity; this replica wins ties, and loses to a longer prefix or a shorter queue.

    Args:
        hashes: The hashes of the prompt's blocks.
        known: The number of leading blocks that each replica holds, by the replica's id.
        places: The indices in `views` of the replicas that can serve the request.
        views: All replicas.
        affinity: A hash of the name that the client gave for requests that belong together.
    """
    if affinity is not None:
        return [_rendezvous_choice(affinity, places, views), *_prefix_holders(known, places, views)]
    if not hashes:
        return []
    new = next(iter(known.values()), 0)
    favourite = _rendezvous_choice(hashes[min(new, len(hashes) - 1)], places, views)
    return [*_prefix_holders(known, places, views), favourite]


def _prefix_holders(known: Mapping[str, int], places: Sequence[int], views: Sequence[ReplicaView]) -> list[int]:
    """Return the indices in `views` of the replicas that hold most of a prompt's prefix.

    The holders of the longest part come first. At most MAX_PREFIX_HOLDERS holders are returned in a
    large fleet. Among holders of equal parts, the least occupied are then returned, because
    otherwise the first replica would get every request.

    Args:
        known: The number of the prompt's blocks that each replica holds, by replica id.
        places: The indices in `views` of the replicas that can be chosen.
        views: The replicas.
    """
    holders = [(-known[view.replica_id], place) for place in places if (view := views[place]).replica_id in known]
    holders.sort()
    if len(holders) > MAX_PREFIX_HOLDERS and len(places) > MAX_COMPARED_REPLICAS:
        last = holders[MAX_PREFIX_HOLDERS - 1][0]
        equal = [place for blocks, place in holders if blocks == last]
        equal.sort(key=lambda place: occupancy(views[place]))
        return [*(place for blocks, place in holders if blocks < last), *equal][:MAX_PREFIX_HOLDERS]
    return [place for _, place in holders]


def _rendezvous_choice(key: int, places: Sequence[int], views: Sequence[ReplicaView]) -> int:
    """Return the index in `views` of the replica that rendezvous hashing chooses for `key`.

    All gateways choose the same replica of those at `places`. When a replica leaves, only the keys
    of this replica move to other replicas.
    """
    scores = [xxh3_64_intdigest(views[place].replica_id.encode(), key) for place in places]
    return places[scores.index(max(scores))]


def _cached_blocks(held: Sequence[CachedPrefix], bit: int) -> int:
    for blocks, bits in held:
        if bits & bit:
            return blocks
    return 0
