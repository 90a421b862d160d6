"""The queue of a model: priority tiers with minimum shares, and fair queueing inside a tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmops.gateway.interfaces import QueuedRequest, ReplicaCapacity
from llmops.gateway.routing.admission.fair_queue import FairQueue, expected_service_cost, service_cost

#: Maximum seconds that a request which does not fit waits until room is reserved for it. Short,
#: because smaller requests overtake the request until then.
RESERVATION_DELAY = 2.0
#: Share of a tier's maximum wait after which room is reserved for a request that does not fit, if
#: this time is shorter than RESERVATION_DELAY.
RESERVATION_DELAY_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class PriorityTier:
    """A priority tier.

    Attributes:
        name: Name of the tier.
        weight: Weight of each waiting tenant in the demand that gateways declare to a shared
            engine.
        share: Minimum share of all served tokens that the tier gets while its requests wait.
        max_wait: Maximum seconds to the first token. Requests with a longer predicted wait are
            rejected.
    """

    name: str
    weight: float = 1.0
    share: float = 0.0
    max_wait: float = 300.0


class _TierQueue:
    def __init__(self, tier: PriorityTier) -> None:
        self.tier, self.queue = tier, FairQueue()
        # cost to which the tier's minimum share entitles it, beyond the cost that it was served
        self.credit = 0.0


class TieredQueue:
    """The waiting requests of all tiers. Requests of an unknown tier belong to the default tier.

    `held` is the first request that has waited for room longer than `patience`. Other requests pass
    it only on replicas without room for it.
    """

    def __init__(self, tiers: Sequence[PriorityTier], patience: float = RESERVATION_DELAY, default: str = "") -> None:
        """Create a queue with an empty fair queue for each tier.

        Args:
            tiers: At least one tier, the highest first.
            patience: Seconds after which room is reserved for a request that does not fit.
            default: Name of the default tier. If no tier has this name, the last tier is the
                default.
        """
        self._tiers = [_TierQueue(tier) for tier in tiers]
        self._by_name = {tier.tier.name: tier for tier in self._tiers}
        self._default = self._by_name.get(default, self._tiers[-1])
        self._patience = patience
        self.held: QueuedRequest | None = None
        self.bytes = 0
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[QueuedRequest]:
        for tier in self._tiers:
            yield from tier.queue

    def tier(self, request: QueuedRequest) -> PriorityTier:
        return self._tier_queue(request).tier

    def rank(self, request: QueuedRequest) -> int:
        """Return the rank of the request's tier, 0 for the highest."""
        return self._tiers.index(self._tier_queue(request))

    def push(self, request: QueuedRequest) -> None:
        self._tier_queue(request).queue.push(request)
        self.bytes += request.bytes
        self.size += 1

    def remove(self, request: QueuedRequest) -> bool:
        """Remove a request. Return False if it was not queued."""
        tier = self._tier_queue(request)
        if not tier.queue.remove(request):
            return False
        self.bytes -= request.bytes
        self.size -= 1
        if not tier.queue.size:
            tier.credit = 0.0
        if request is self.held:
            self.held = None
        return True

    def pop(self, capacity: ReplicaCapacity, now: float) -> QueuedRequest | None:
        """Remove and return the next request that fits, or None if no waiting request fits."""
        for tier in self._in_turn():
            request, too_large = tier.queue.next(capacity, now)
            if self.held is None:
                patience = min(self._patience, tier.tier.max_wait * RESERVATION_DELAY_SHARE)
                self.held = next((one for one in too_large if now - one.arrived > patience), None)
            if request is not None:
                self._take_from(tier, request)
                return request
        return None

    def take(self, request: QueuedRequest) -> None:
        """Charge a request that is dispatched without having been queued."""
        self._tier_queue(request).queue.begin(request)

    def served(self, request: QueuedRequest, prompt: int, output: int) -> None:
        """Charge a request's tenant for tokens beyond the charge on dispatch.

        A negative number of tokens is a refund.
        """
        self._tier_queue(request).queue.charge(request, service_cost(prompt, output))

    def ahead(self, request: QueuedRequest) -> float:
        """Return the cost of all requests that would be served before `request` if queued now."""
        before = 0.0
        own = self._tier_queue(request)
        for tier in self._tiers:
            if tier is own:
                return before + tier.queue.ahead(request.tenant, request.weight)
            before += tier.queue.cost
        return before

    @property
    def mean_cost(self) -> float:
        """Return the mean cost of a waiting request, or 0 if no request waits."""
        return sum(tier.queue.cost for tier in self._tiers) / self.size if self.size else 0.0

    def backlogs(self) -> Iterator[tuple[PriorityTier, float]]:
        """Yield each waiting tier with the cost that is served before a new request of the tier."""
        before = 0.0
        for tier in self._tiers:
            before += tier.queue.cost
            if tier.queue.size:
                yield tier.tier, before

    def demand(self) -> float:
        """Return the summed weights of the waiting tenants.

        This gateway declares the sum to the engines.
        """
        return sum(tier.tier.weight * tier.queue.weight for tier in self._tiers)

    def has_waiting(self, tenant: str) -> bool:
        """Return True if requests of the tenant wait in any tier."""
        return any(tier.queue.backlog(tenant) is not None for tier in self._tiers)

    def waiting(self) -> Mapping[str, int]:
        """Return the number of waiting requests by tier."""
        return {tier.tier.name: tier.queue.size for tier in self._tiers}

    def eviction_candidate(self, request: QueuedRequest) -> QueuedRequest | None:
        """Return the queued request that loses its place to `request` in a full queue, or None.

        The candidate is the youngest request of the longest backlog in the lowest waiting tier. The
        result is None if that tier is above the tier of `request`, or if the backlog of `request`
        would become the longest.
        """
        tier = next(tier for tier in reversed(self._tiers) if tier.queue.size)
        own = self._tier_queue(request)
        longest = tier.queue.longest()
        assert longest is not None
        if tier is own:
            backlog = own.queue.backlog(request.tenant)
            cost = (backlog.cost if backlog else 0.0) + expected_service_cost(request)
            if cost / request.weight >= longest.cost / longest.weight:
                return None
        elif self._tiers.index(tier) < self._tiers.index(own):
            return None
        return next(reversed(longest.requests))

    def _take_from(self, tier: _TierQueue, request: QueuedRequest) -> None:
        cost = expected_service_cost(request)
        tier.queue.begin(request)
        if tier.credit > 0:
            tier.credit -= cost
        for other in self._tiers:
            if other.tier.share and other.queue.size:
                other.credit += other.tier.share * cost
        self.remove(request)

    def _in_turn(self) -> list[_TierQueue]:
        """Return the waiting tiers in the order of service.

        Tiers whose minimum share entitles them to a request come first, then all tiers from the
        highest down.
        """
        waiting = [tier for tier in self._tiers if tier.queue.size]
        if len(waiting) < 2:
            return waiting
        owed = [tier for tier in waiting if tier.tier.share and tier.credit >= tier.queue.cost / tier.queue.size]
        return [*owed, *(tier for tier in waiting if tier not in owed)]

    def _tier_queue(self, request: QueuedRequest) -> _TierQueue:
        return self._by_name.get(request.tier, self._default)
