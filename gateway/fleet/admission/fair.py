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

from llmops.gateway.messages import Room, Ticket

# What a token of a prompt and one of an answer cost.
PROMPT, ANSWER = 1.0, 2.0
# How many that wait are looked at for one whose home has room, or that fits at all.
LOOKED_AT = 64
# Counters of tenants that do not wait are kept for so many.
IDLE = 10_000


def cost(prompt: float, answer: float) -> float:
    return PROMPT * prompt + ANSWER * answer


def cost_of(ticket: Ticket) -> float:
    """What serving all of it costs, its answer as it will probably be."""
    return PROMPT * ticket.wanted.tokens + ANSWER * ticket.wanted.answer


class Backlog:
    """What one tenant waits for, first come first served."""

    __slots__ = ("cost", "tickets", "weight")

    def __init__(self) -> None:
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.cost = 0.0
        self.weight = 1.0


class Fair:
    """Those who wait in one tier. `cost`: of all of them together; `weight`: of their tenants."""

    def __init__(self) -> None:
        self.size = 0
        self.cost = 0.0
        self.weight = 0.0
        self._waiting: dict[str, Backlog] = {}
        self._counters: dict[str, float] = {}
        # (counter, when it was entered, tenant); out of date where the counter is another by now
        self._heap: list[tuple[float, int, str]] = []
        self._entered = 0
        # the counter of the last whose turn it was, for those who come when nobody waits
        self._floor = 0.0

    def push(self, ticket: Ticket) -> None:
        tenant = ticket.tenant
        backlog = self._waiting.get(tenant)
        if backlog is None:
            self._lift(tenant)
            backlog = self._waiting[tenant] = Backlog()
            backlog.weight = ticket.weight
            self.weight += ticket.weight
            self._enter(tenant)
        backlog.tickets[ticket] = None
        if ticket.moved:
            backlog.tickets.move_to_end(ticket, last=False)
        backlog.cost += cost_of(ticket)
        self.cost += cost_of(ticket)
        self.size += 1

    def remove(self, ticket: Ticket) -> bool:
        backlog = self._waiting.get(ticket.tenant)
        if backlog is None or ticket not in backlog.tickets:
            return False
        del backlog.tickets[ticket]
        backlog.cost -= cost_of(ticket)
        self.cost -= cost_of(ticket)
        self.size -= 1
        if not backlog.tickets:
            del self._waiting[ticket.tenant]
            self.weight = self.weight - backlog.weight if self._waiting else 0.0
            if not self._waiting:
                self.cost, self._heap = 0.0, []
        return True

    def begin(self, ticket: Ticket) -> None:
        """It is its turn: all that it will probably cost is charged."""
        if ticket.tenant not in self._waiting:
            self._lift(ticket.tenant)
        self.charge(ticket, cost_of(ticket))
        self._floor = self._counters[ticket.tenant]

    def charge(self, ticket: Ticket, amount: float) -> None:
        """`amount` of cost more; negative: it was less than was charged."""
        counters, tenant = self._counters, ticket.tenant
        counter = counters.get(tenant, 0.0) + amount / ticket.weight
        counters[tenant] = counter if counter > 0 else 0.0
        if tenant in self._waiting and amount < 0:
            self._enter(tenant)
        if len(counters) > IDLE + len(self._waiting):
            self._drop_idle()

    def next(self, room: Room, now: float) -> tuple[Ticket | None, list[Ticket]]:
        """The next that fits, and those before it that do not. It is not taken out."""
        fallback: Ticket | None = None
        without_room: list[Ticket] = []
        with closing(self._in_order()) as backlogs:
            for ticket in islice(_entitled(backlogs, room.left), LOOKED_AT):
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

    def longest(self) -> Backlog | None:
        """Whose backlog is the longest, for its weight."""
        return max(self._waiting.values(), key=lambda one: one.cost / one.weight, default=None)

    def backlog(self, tenant: str) -> Backlog | None:
        return self._waiting.get(tenant)

    def counter(self, tenant: str) -> float:
        """What it was served, ÷ its weight, since all began."""
        return self._counters.get(tenant, 0.0)

    def __iter__(self) -> Iterator[Ticket]:
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

    def _in_order(self) -> Generator[Backlog, None, None]:
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


def _entitled(backlogs: Iterable[Backlog], left: Callable[[Ticket], bool] | None) -> Iterator[Ticket]:
    """All who wait, but for tenants that leave the room to others."""
    for backlog in backlogs:
        if left is None or not left(next(iter(backlog.tickets))):
            yield from backlog.tickets
