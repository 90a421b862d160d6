"""Weighted fair queueing of tenants by the cost of the tokens that they were served.

The algorithm is Virtual Token Counter (Sheng et al., OSDI '24). Each tenant has a counter of the
cost it was served, divided by its weight. The waiting tenant with the lowest counter is served
next. A tenant that returns is lifted to the lowest counter of the waiting tenants, so that idle
time earns no credit. The expected cost of an answer is charged on dispatch and corrected at its end
(the paper's variant with predicted lengths).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from heapq import heapify, heappop, heappush
from itertools import islice

from llmops.gateway.interfaces import QueuedRequest, ReplicaCapacity

#: Cost of a prompt token. The unit of all costs.
PROMPT_TOKEN_COST = 1.0
#: Cost of an output token in prompt tokens, as in the paper on Virtual Token Counter.
OUTPUT_TOKEN_COST = 2.0
#: Maximum number of waiting requests that are examined to find one that fits a replica, which
#: bounds the time of a dispatch.
MAX_CANDIDATES = 64
#: Maximum number of counters kept for tenants without waiting requests, which bounds the memory.
MAX_IDLE_COUNTERS = 10_000


def service_cost(prompt: float, output: float) -> float:
    return PROMPT_TOKEN_COST * prompt + OUTPUT_TOKEN_COST * output


def expected_service_cost(request: QueuedRequest) -> float:
    """Return the cost of a request with its expected output length."""
    return PROMPT_TOKEN_COST * request.routing.tokens + OUTPUT_TOKEN_COST * request.routing.answer


class TenantBacklog:
    """The waiting requests of one tenant, in order of arrival."""

    def __init__(self) -> None:
        self.requests: OrderedDict[QueuedRequest, None] = OrderedDict()
        self.cost = 0.0
        self.weight = 1.0


class FairQueue:
    """The queue of one tier.

    Attributes:
        size: Number of queued requests.
        cost: Sum of the expected costs of all queued requests.
        weight: Sum of the weights of all tenants with queued requests.
    """

    def __init__(self) -> None:
        self.size = 0
        self.cost = 0.0
        self.weight = 0.0
        self._backlogs: dict[str, TenantBacklog] = {}
        self._counters: dict[str, float] = {}
        # (counter, number of the entry, tenant); an entry is stale if the tenant's counter has
        # changed since
        self._heap: list[tuple[float, int, str]] = []
        self._entries = 0
        # counter of the tenant that was served last; a tenant that returns to an empty queue is
        # lifted to it
        self._floor = 0.0

    def push(self, request: QueuedRequest) -> None:
        tenant = request.tenant
        backlog = self._backlogs.get(tenant)
        if backlog is None:
            self._lift(tenant)
            backlog = self._backlogs[tenant] = TenantBacklog()
            backlog.weight = request.weight
            self.weight += request.weight
            self._push_tenant(tenant)
        backlog.requests[request] = None
        if request.moved:
            backlog.requests.move_to_end(request, last=False)
        backlog.cost += expected_service_cost(request)
        self.cost += expected_service_cost(request)
        self.size += 1

    def remove(self, request: QueuedRequest) -> bool:
        """Remove a request. Return False if it is not in this queue."""
        backlog = self._backlogs.get(request.tenant)
        if backlog is None or request not in backlog.requests:
            return False
        del backlog.requests[request]
        backlog.cost -= expected_service_cost(request)
        self.cost -= expected_service_cost(request)
        self.size -= 1
        if not backlog.requests:
            del self._backlogs[request.tenant]
            self.weight = self.weight - backlog.weight if self._backlogs else 0.0
            if not self._backlogs:
                self.cost, self._heap = 0.0, []
        return True

    def begin(self, request: QueuedRequest) -> None:
        """Charge the tenant the expected cost of a request that is dispatched now."""
        if request.tenant not in self._backlogs:
            self._lift(request.tenant)
        self.charge(request, expected_service_cost(request))
        self._floor = self._counters[request.tenant]

    def charge(self, request: QueuedRequest, cost: float) -> None:
        """Add `cost` to the counter of the request's tenant. A negative cost is a refund."""
        counters, tenant = self._counters, request.tenant
        counter = counters.get(tenant, 0.0) + cost / request.weight
        counters[tenant] = counter if counter > 0 else 0.0
        if tenant in self._backlogs and cost < 0:
            self._push_tenant(tenant)
        if len(counters) > MAX_IDLE_COUNTERS + len(self._backlogs):
            self._drop_idle_counters()

    def next(self, capacity: ReplicaCapacity, now: float) -> tuple[QueuedRequest | None, list[QueuedRequest]]:
        """Return the next request that fits on a replica, and the earlier requests that do not fit.

        A request whose home is another replica is returned only once its time for the home has
        passed, and if no other request fits. Without a request that fits, the first value is None.
        No request is removed.

        Args:
            capacity: The room of the replica.
            now: The current time.
        """
        fallback: QueuedRequest | None = None
        too_large: list[QueuedRequest] = []
        with closing(self._in_order()) as backlogs:
            for request in islice(_candidates(backlogs, capacity.must_yield), MAX_CANDIDATES):
                if request.size > capacity.tokens or (capacity.accepts is not None and not capacity.accepts(request)):
                    if fallback is None:
                        too_large.append(request)
                elif request.home in ("", capacity.replica_id) or not capacity.replica_id:
                    return request, too_large
                elif fallback is None and request.home_until <= now:
                    fallback = request
        return fallback, too_large

    def ahead(self, tenant: str, weight: float) -> float:
        """Return the cost that is served before a new request of a tenant with this weight.

        The cost is the backlog of the tenant itself, and what other tenants are served meanwhile.
        Other tenants are served in proportion to their weights, and at most their backlogs.
        """
        backlog = self._backlogs.get(tenant)
        own = backlog.cost if backlog else 0.0
        other_weight = self.weight - (backlog.weight if backlog else 0.0)
        return own + min(self.cost - own, own * other_weight / weight)

    def longest(self) -> TenantBacklog | None:
        """Return the backlog with the highest cost relative to its weight, or None without any."""
        return max(self._backlogs.values(), key=lambda backlog: backlog.cost / backlog.weight, default=None)

    def backlog(self, tenant: str) -> TenantBacklog | None:
        return self._backlogs.get(tenant)

    def counter(self, tenant: str) -> float:
        """Return the cost that a tenant was served, divided by its weight."""
        return self._counters.get(tenant, 0.0)

    def __iter__(self) -> Iterator[QueuedRequest]:
        for backlog in self._backlogs.values():
            yield from backlog.requests

    def _push_tenant(self, tenant: str) -> None:
        self._entries += 1
        heappush(self._heap, (self._counters[tenant], self._entries, tenant))
        if len(self._heap) > 2 * len(self._backlogs) + 64:
            self._heap = [(self._counters[name], at, name) for at, name in enumerate(self._backlogs)]
            self._entries = len(self._heap)
            heapify(self._heap)

    def _lift(self, tenant: str) -> None:
        first = self._first_tenant()
        lowest = self._floor if first is None else self._counters[first]
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), lowest)

    def _first_tenant(self) -> str | None:
        """Return the waiting tenant with the lowest counter, or None if no tenant waits.

        Stale entries at the top of the heap are dropped or renewed.
        """
        heap, counters = self._heap, self._counters
        while heap:
            entered, _, tenant = heap[0]
            if tenant not in self._backlogs or entered > counters[tenant]:
                heappop(heap)
            elif entered < counters[tenant]:
                heappop(heap)
                self._push_tenant(tenant)
            else:
                return tenant
        return None

    def _in_order(self) -> Generator[TenantBacklog, None, None]:
        """Yield the backlogs by their counters, the lowest first.

        Entries are taken from the heap, and return to it when the generator is closed.
        """
        taken: list[tuple[float, int, str]] = []
        seen: set[str] = set()
        try:
            while (tenant := self._first_tenant()) is not None:
                taken.append(heappop(self._heap))
                if tenant not in seen:
                    seen.add(tenant)
                    yield self._backlogs[tenant]
        finally:
            for entry in taken:
                heappush(self._heap, entry)

    def _drop_idle_counters(self) -> None:
        """Drop the lower half of the idle tenants' counters.

        A dropped counter rarely matters: a tenant that returns gets at least the lowest counter of
        the waiting tenants.
        """
        idle = sorted((counter, name) for name, counter in self._counters.items() if name not in self._backlogs)
        for _, name in idle[: len(idle) // 2]:
            del self._counters[name]


def _candidates(
    backlogs: Iterable[TenantBacklog], must_yield: Callable[[QueuedRequest], bool] | None
) -> Iterator[QueuedRequest]:
    """Yield the waiting requests, except those of tenants that must leave the slot to others."""
    for backlog in backlogs:
        if must_yield is None or not must_yield(next(iter(backlog.requests))):
            yield from backlog.requests
