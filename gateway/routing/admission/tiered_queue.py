"""Who is next: strict tiers, of which each may have a least share, and fair turns inside of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmops.gateway.interfaces import QueuedRequest, ReplicaCapacity
from llmops.gateway.routing.admission.fair_queue import FairQueue, expected_service_cost, service_cost

# Seconds after which room is held for one that does not fit.
RESERVATION_DELAY = 2.0
# … or this part of the longest wait of its tier.
RESERVATION_DELAY_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class PriorityTier:
    """`weight`: what one of its tenants counts for when gateways share an engine; `share`: of all that is served, the
    least that it gets while it waits; `max_wait` for a first token (s): who would wait longer is refused.
    """

    name: str
    weight: float = 1.0
    share: float = 0.0
    max_wait: float = 300.0


class _TierQueue:
    __slots__ = ("credit", "queue", "tier")

    def __init__(self, tier: PriorityTier) -> None:
        self.tier, self.queue = tier, FairQueue()
        # cost that its share has earned beyond what it was served
        self.credit = 0.0


class TieredQueue:
    """The Order of a gateway; a ticket of a tier that is not there is one of `default`, or else of the last.

    `held` is the first that waits for room longer than `patience`; others pass it only where it has none.
    """

    def __init__(self, tiers: Sequence[PriorityTier], patience: float = RESERVATION_DELAY, default: str = "") -> None:
        """`tiers`: the highest first, at least one."""
        self._lanes = [_TierQueue(tier) for tier in tiers]
        self._by_name = {lane.tier.name: lane for lane in self._lanes}
        self._others = self._by_name.get(default, self._lanes[-1])
        self._patience = patience
        self.held: QueuedRequest | None = None
        self.bytes = 0
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[QueuedRequest]:
        for lane in self._lanes:
            yield from lane.queue

    def tier(self, ticket: QueuedRequest) -> PriorityTier:
        return self._lane(ticket).tier

    def rank(self, ticket: QueuedRequest) -> int:
        """0 for the highest."""
        return self._lanes.index(self._lane(ticket))

    def push(self, ticket: QueuedRequest) -> None:
        self._lane(ticket).queue.push(ticket)
        self.bytes += ticket.bytes
        self.size += 1

    def remove(self, ticket: QueuedRequest) -> bool:
        lane = self._lane(ticket)
        if not lane.queue.remove(ticket):
            return False
        self.bytes -= ticket.bytes
        self.size -= 1
        if not lane.queue.size:
            lane.credit = 0.0
        if ticket is self.held:
            self.held = None
        return True

    def pop(self, room: ReplicaCapacity, now: float) -> QueuedRequest | None:
        for lane in self._turns():
            ticket, without_room = lane.queue.next(room, now)
            if self.held is None:
                patience = min(self._patience, lane.tier.max_wait * RESERVATION_DELAY_SHARE)
                self.held = next((one for one in without_room if now - one.arrived > patience), None)
            if ticket is not None:
                self._take(lane, ticket)
                return ticket
        return None

    def take(self, ticket: QueuedRequest) -> None:
        """It is served without having waited, as nobody does."""
        self._lane(ticket).queue.begin(ticket)

    def served(self, ticket: QueuedRequest, prompt: int, answer: int) -> None:
        self._lane(ticket).queue.charge(ticket, service_cost(prompt, answer))

    def ahead(self, ticket: QueuedRequest) -> float:
        before = 0.0
        for lane in self._lanes:
            if lane is self._lane(ticket):
                return before + lane.queue.ahead(ticket.tenant, ticket.weight)
            before += lane.queue.cost
        return before

    def demand(self) -> float:
        return sum(lane.tier.weight * lane.queue.weight for lane in self._lanes)

    def waiting(self) -> Mapping[str, int]:
        """How many wait in each tier."""
        return {lane.tier.name: lane.queue.size for lane in self._lanes}

    def last_for(self, ticket: QueuedRequest) -> QueuedRequest | None:
        """Who gives up its place to `ticket` when there are no more: the youngest of the longest backlog of the lowest
        tier that waits. None when that is the one that `ticket` itself would add to, or one above its own."""
        lane = next(lane for lane in reversed([*self._lanes]) if lane.queue.size)
        own = self._lane(ticket)
        longest = lane.queue.longest()
        assert longest is not None
        if lane is own:
            mine = own.queue.backlog(ticket.tenant)
            if (
                (mine.cost if mine else 0.0) + expected_service_cost(ticket)
            ) / ticket.weight >= longest.cost / longest.weight:
                return None
        elif self._lanes.index(lane) < self._lanes.index(own):
            return None
        return next(reversed(longest.tickets))

    def _take(self, lane: _TierQueue, ticket: QueuedRequest) -> None:
        amount = expected_service_cost(ticket)
        lane.queue.begin(ticket)
        if lane.credit > 0:
            lane.credit -= amount
        for other in self._lanes:
            if other.tier.share and other.queue.size:
                other.credit += other.tier.share * amount
        self.remove(ticket)

    def _turns(self) -> list[_TierQueue]:
        """The lanes that wait: those whose share has earned a request, then all from the highest down."""
        waiting = [lane for lane in self._lanes if lane.queue.size]
        if len(waiting) < 2:
            return waiting
        owed = [lane for lane in waiting if lane.tier.share and lane.credit >= lane.queue.cost / lane.queue.size]
        return [*owed, *(lane for lane in waiting if lane not in owed)]

    def _lane(self, ticket: QueuedRequest) -> _TierQueue:
        return self._by_name.get(ticket.tier, self._others)
