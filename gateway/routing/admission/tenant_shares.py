"""The running requests of each tenant, which decide who must leave the last slots to others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from llmops.gateway.interfaces import QueuedRequest


class TenantShares:
    """The number of running requests of each tenant, by tier.

    A fair queue alone does not protect a tenant with few requests from tenants with many. The queue
    always serves the small tenant next, but the batches are full, and the first free slot is rarely
    on the replica that has cached the tenant's prefix.
    """

    def __init__(self, rank: Callable[[QueuedRequest], int]) -> None:
        """Create empty counts. `rank` returns the rank of a request's tier, 0 for the highest."""
        self._rank = rank
        self._running: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._totals: Counter[int] = Counter()

    def add(self, request: QueuedRequest) -> None:
        rank = self._rank(request)
        self._running[rank][request.tenant] += 1
        self._totals[rank] += 1

    def release(self, request: QueuedRequest) -> None:
        """Remove a request that has ended, or that was dispatched and never sent."""
        rank = self._rank(request)
        running = self._running[rank]
        self._totals[rank] -= 1
        running[request.tenant] -= 1
        if running[request.tenant] <= 0:
            del running[request.tenant]

    def must_yield(self, request: QueuedRequest) -> bool:
        """Return True if a request must leave the last free slots to other requests.

        The slots are left to requests of higher tiers that run, and to tenants of the same tier
        that run fewer requests than their equal share.
        """
        rank = self._rank(request)
        if any(count > 0 for higher, count in self._totals.items() if higher < rank):
            return True
        running = self._running[rank]
        return running[request.tenant] * len(running) > self._totals[rank]
