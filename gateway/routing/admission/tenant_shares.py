"""Who has more than its part of what runs, and so leaves the last places to others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from llmops.gateway.interfaces import QueuedRequest


class TenantShares:
    """What runs of each tenant, tier by tier. `rank`: of a ticket's tier, 0 for the highest.

    A fair queue alone does not keep a tenant that asks for little from those who ask for much: it is next at once, but
    the batches are full, and the first place that comes free is hardly ever where its prefix is cached.
    """

    def __init__(self, rank: Callable[[QueuedRequest], int]) -> None:
        self._rank = rank
        self._running: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._all: Counter[int] = Counter()

    def took(self, ticket: QueuedRequest) -> None:
        rank = self._rank(ticket)
        self._running[rank][ticket.tenant] += 1
        self._all[rank] += 1

    def gave(self, ticket: QueuedRequest) -> None:
        """It has ended, or did not go after all."""
        rank = self._rank(ticket)
        running = self._running[rank]
        self._all[rank] -= 1
        running[ticket.tenant] -= 1
        if running[ticket.tenant] <= 0:
            del running[ticket.tenant]

    def leaves(self, ticket: QueuedRequest) -> bool:
        """Whether others have more right to a last place: those of a higher tier, or tenants with less than their equal
        part of what runs of its own."""
        rank = self._rank(ticket)
        if any(count > 0 for higher, count in self._all.items() if higher < rank):
            return True
        running = self._running[rank]
        return running[ticket.tenant] * len(running) > self._all[rank]
