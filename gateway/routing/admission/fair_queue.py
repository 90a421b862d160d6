"""Fair shares of served tokens among tenants: the Virtual Token Counter of Sheng et al., OSDI '24, with weights.

Each tenant has a counter of what it was served, ÷ its weight; of those that wait the one with the lowest is next. One
that comes back is lifted to the lowest of those that wait, so that nobody saves up for later. What an answer will
probably cost is charged when its turn comes, and put right when it ends (their variant with predicted lengths).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from heapq import heapify, heappop, heappush
from itertools import islice

from llmops.gateway.interfaces import QueuedRequest, ReplicaCapacity

# What a token of a prompt and one of an answer cost.
PROMPT_TOKEN_COST, OUTPUT_TOKEN_COST = 1.0, 2.0
# How many that wait are looked at for one whose home has room, or that fits at all.
MAX_CANDIDATES = 64
# Counters of tenants that do not wait are kept for so many.
MAX_IDLE_COUNTERS = 10_000


def service_cost(prompt: float, answer: float) -> float:
    return PROMPT_TOKEN_COST * prompt + OUTPUT_TOKEN_COST * answer


def expected_service_cost(ticket: QueuedRequest) -> float:
    """What serving all of it costs, its answer as it will probably be."""
    return PROMPT_TOKEN_COST * ticket.wanted.tokens + OUTPUT_TOKEN_COST * ticket.wanted.answer


class TenantBacklog:
    """What one tenant waits for, first come first served."""

    __slots__ = ("cost", "tickets", "weight")

    def __init__(self) -> None:
        self.tickets: OrderedDict[QueuedRequest, None] = OrderedDict()
        self.cost = 0.0
        self.weight = 1.0


class FairQueue:
    """Those who wait in one tier. `service_cost`: of all of them together; `weight`: of their tenants."""

    def __init__(self) -> None:
        self.size = 0
        self.cost = 0.0
        self.weight = 0.0
        self._waiting: dict[str, TenantBacklog] = {}
        self._counters: dict[str, float] = {}
        # (counter, when it was entered, tenant); out of date where the counter is another by now
        self._heap: list[tuple[float, int, str]] = []
        self._entered = 0
        # the counter of the last whose turn it was, for those who come when nobody waits
        self._floor = 0.0

    def push(self, ticket: QueuedRequest) -> None:
        tenant = ticket.tenant
        backlog = self._waiting.get(tenant)
        if backlog is None:
            self._lift(tenant)
            backlog = self._waiting[tenant] = TenantBacklog()
            backlog.weight = ticket.weight
            self.weight += ticket.weight
            self._enter(tenant)
        backlog.tickets[ticket] = None
        if ticket.moved:
            backlog.tickets.move_to_end(ticket, last=False)
        backlog.cost += expected_service_cost(ticket)
        self.cost += expected_service_cost(ticket)
        self.size += 1

    def remove(self, ticket: QueuedRequest) -> bool:
        backlog = self._waiting.get(ticket.tenant)
        if backlog is None or ticket not in backlog.tickets:
            return False
        del backlog.tickets[ticket]
        backlog.cost -= expected_service_cost(ticket)
        self.cost -= expected_service_cost(ticket)
        self.size -= 1
        if not backlog.tickets:
            del self._waiting[ticket.tenant]
            self.weight = self.weight - backlog.weight if self._waiting else 0.0
            if not self._waiting:
                self.cost, self._heap = 0.0, []
        return True

    def begin(self, ticket: QueuedRequest) -> None:
        """It is its turn: all that it will probably cost is charged."""
        if ticket.tenant not in self._waiting:
            self._lift(ticket.tenant)
        self.charge(ticket, expected_service_cost(ticket))
        self._floor = self._counters[ticket.tenant]

    def charge(self, ticket: QueuedRequest, amount: float) -> None:
        """`amount` of cost more; negative: it was less than was charged."""
        counters, tenant = self._counters, ticket.tenant
        counter = counters.get(tenant, 0.0) + amount / ticket.weight
        counters[tenant] = counter if counter > 0 else 0.0
        if tenant in self._waiting and amount < 0:
            self._enter(tenant)
        if len(counters) > MAX_IDLE_COUNTERS + len(self._waiting):
            self._drop_idle()

    def next(self, room: ReplicaCapacity, now: float) -> tuple[QueuedRequest | None, list[QueuedRequest]]:
        """The next that fits, and those before it that do not. It is not taken out."""
        fallback: QueuedRequest | None = None
        without_room: list[QueuedRequest] = []
        with closing(self._in_order()) as backlogs:
            for ticket in islice(_eligible_requests(backlogs, room.left), MAX_CANDIDATES):
                if ticket.size > room.tokens or (room.takes is not None and not room.takes(ticket)):
                    if fallback is None:
                        without_room.append(ticket)
                elif ticket.home in ("", room.replica_id) or not room.replica_id:
                    return ticket, without_room
                elif fallback is None and ticket.stays <= now:
                    fallback = ticket
        return fallback, without_room

    def ahead(self, tenant: str, weight: float) -> float:
        """Cost that is served before a new ticket of a tenant: its own, and the others' in that time by their weights,
        but no more than they wait for."""
        backlog = self._waiting.get(tenant)
        own = backlog.cost if backlog else 0.0
        others = self.weight - (backlog.weight if backlog else 0.0)
        return own + min(self.cost - own, own * others / weight)

    def longest(self) -> TenantBacklog | None:
        """Whose backlog is the longest, for its weight."""
        return max(self._waiting.values(), key=lambda one: one.cost / one.weight, default=None)

    def backlog(self, tenant: str) -> TenantBacklog | None:
        return self._waiting.get(tenant)

    def counter(self, tenant: str) -> float:
        """What it was served, ÷ its weight, since all began."""
        return self._counters.get(tenant, 0.0)

    def __iter__(self) -> Iterator[QueuedRequest]:
        for backlog in self._waiting.values():
            yield from backlog.tickets

    def _enter(self, tenant: str) -> None:
        self._entered += 1
        heappush(self._heap, (self._counters[tenant], self._entered, tenant))
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [(self._counters[name], at, name) for at, name in enumerate(self._waiting)]
            self._entered = len(self._heap)
            heapify(self._heap)

    def _lift(self, tenant: str) -> None:
        first = self._first()
        lowest = self._floor if first is None else self._counters[first]
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), lowest)

    def _first(self) -> str | None:
        """The tenant that is next; what is out of date before it is put right."""
        heap, counters = self._heap, self._counters
        while heap:
            entered, _, tenant = heap[0]
            if tenant not in self._waiting or entered > counters[tenant]:
                heappop(heap)
            elif entered < counters[tenant]:
                heappop(heap)
                self._enter(tenant)
            else:
                return tenant
        return None

    def _in_order(self) -> Generator[TenantBacklog, None, None]:
        """Those who wait, by their counters; what was taken out of the heap is put back when the caller has enough."""
        taken: list[tuple[float, int, str]] = []
        seen: set[str] = set()
        try:
            while (tenant := self._first()) is not None:
                taken.append(heappop(self._heap))
                if tenant not in seen:
                    seen.add(tenant)
                    yield self._waiting[tenant]
        finally:
            for entry in taken:
                heappush(self._heap, entry)

    def _drop_idle(self) -> None:
        """Idle tenants below the lowest would be lifted to it anyway; of the others those with least go first."""
        idle = sorted((c, name) for name, c in self._counters.items() if name not in self._waiting)
        for _, name in idle[: len(idle) // 2]:
            del self._counters[name]


def _eligible_requests(
    backlogs: Iterable[TenantBacklog], left: Callable[[QueuedRequest], bool] | None
) -> Iterator[QueuedRequest]:
    """All who wait, but for tenants that leave the room to others."""
    for backlog in backlogs:
        if left is None or not left(next(iter(backlog.tickets))):
            yield from backlog.tickets
