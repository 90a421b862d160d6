"""The gate on an event loop: requests wait in it until there is room for them, or until that would take too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter

from llmops.gateway.errors import ApiError, UnavailableError
from llmops.gateway.interfaces import QueuedRequest, ReplicaView, RoutingPolicy, RoutingRequest, SchedulingParams
from llmops.gateway.routing.admission.admission_controller import AdmissionController, AdmissionLimits
from llmops.gateway.routing.admission.tiered_queue import PriorityTier, TieredQueue
from llmops.gateway.settings import GatewaySettings

# Seconds after which those who wait are looked at although nothing was heard: turns and ramps go by time.
POLL_INTERVAL = 0.05
DEFAULT_TIER_NAME, DEFAULT_MAX_WAIT = "standard", 60.0
# Of the objectives that 95 of 100 answers are to keep: what the mean of steps may be, and the predicted wait for a
# first token where the settings name none.
TPOT_MEAN_FACTOR, TTFT_WAIT_FACTOR = 1.0, 0.6


class RequestQueue:
    """Of one model on its replicas. `views` gives them as they are now; `changed` says that they are others."""

    def __init__(
        self,
        gate: AdmissionController,
        views: Callable[[], Sequence[ReplicaView]],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.gate, self._views, self._clock = gate, views, clock
        self._places: dict[QueuedRequest, asyncio.Future[ReplicaView]] = {}
        self._tick: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._places)

    def check(self, ticket: QueuedRequest) -> None:
        """Raises UnavailableError (`overloaded`) where the queue before it alone takes too long: before anything is
        known of its prompt."""
        if self.gate.order:
            wait = self.gate.queued(ticket, self._views())
            if wait > self.gate.limit(ticket, self._clock()):
                raise self._overloaded(wait)

    async def enter(self, ticket: QueuedRequest) -> ReplicaView:
        """The replica to which it goes, now that there is room.

        Raises UnavailableError: `overloaded` with when to come back, or where no replica could take it at all.
        """
        now, views = self._clock(), self._views()
        place = self.gate.at_once(ticket, views, now)
        if place is not None:
            return views[place]
        if not ticket.home:
            raise UnavailableError("No replica of the model can take this request now.")
        wait = self.gate.refusal(ticket, views, now)
        if wait is not None:
            raise self._overloaded(wait)
        return await self._wait(ticket, views, now)

    def changed(self) -> None:
        """A replica's state came, a request ended, or a replica came or went."""
        now, views = self._clock(), self._views()
        self.gate.look(views, now)
        while (placed := self.gate.next(views, now)) is not None:
            future = self._places.pop(placed.ticket)
            if future.done():
                self.gate.unsent(placed.ticket, views[placed.place])
            else:
                future.set_result(views[placed.place])
        self._tick_again()

    def ended(self, ticket: QueuedRequest, answer: int) -> None:
        """Its answer had so many tokens."""
        self.gate.ended(ticket, answer)
        self.changed()

    def close(self) -> None:
        """Those who wait get UnavailableError."""
        for ticket in list(self._places):
            self._refuse(ticket, UnavailableError("The gateway is shutting down; send the request again."))
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None

    async def _wait(self, ticket: QueuedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        loop = asyncio.get_running_loop()
        future = self._places[ticket] = loop.create_future()
        limit = self.gate.limit(ticket, now)
        late = None if ticket.moved else loop.call_later(max(limit, 0), self._late, ticket)
        try:
            for one in self.gate.push(ticket, views, now):
                self._refuse(one, self._overloaded(self.gate.wait(one, views)))
            self.changed()
            place: ReplicaView = await future
            return place
        except asyncio.CancelledError:
            self._give_up(ticket, future)
            raise
        finally:
            if late is not None:
                late.cancel()

    def _give_up(self, ticket: QueuedRequest, future: asyncio.Future[ReplicaView]) -> None:
        """Its client left: in the queue, or when it had just been given a replica."""
        if self._places.pop(ticket, None) is not None:
            self.gate.remove(ticket, self._clock())
        elif future.done() and not future.cancelled() and future.exception() is None:
            self.gate.unsent(ticket, future.result())
            self.changed()

    def _late(self, ticket: QueuedRequest) -> None:
        self._refuse(ticket, self._overloaded(self.gate.queued(ticket, self._views()) or DEFAULT_MAX_WAIT / 60))

    def _refuse(self, ticket: QueuedRequest, error: ApiError) -> None:
        self.gate.remove(ticket, self._clock())
        future = self._places.pop(ticket, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def _overloaded(self, wait: float) -> UnavailableError:
        again = self.gate.retry_after(wait)
        message = f"There are more requests than can be answered in time; try again in {again:.1f} s."
        return UnavailableError(message, code="overloaded", retry_after=again)

    def _tick_again(self) -> None:
        if self._tick is None and self._places:
            self._tick = asyncio.get_running_loop().call_later(POLL_INTERVAL, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        self.changed()


def create_queued_request(
    turn: SchedulingParams, wanted: RoutingRequest, held: int = 0, moved: bool = False
) -> QueuedRequest:
    """`held`: bytes that the request keeps in memory while it waits."""
    return QueuedRequest(turn.tenant, wanted, turn.arrived, turn.tier, 1.0, turn.deadline, held, moved=moved)


def create_admission_controller(
    settings: GatewaySettings, model: str, policy: RoutingPolicy
) -> AdmissionController | None:
    """None where neither objectives nor tiers are set: every request goes at once then."""
    if not settings.tiers and settings.slo_of(model).ttft_p95 is None:
        return None
    return AdmissionController(
        TieredQueue(tiers_from_settings(settings, model), default=DEFAULT_TIER_NAME),
        policy,
        admission_limits_from_settings(settings, model),
    )


def admission_limits_from_settings(settings: GatewaySettings, model: str) -> AdmissionLimits:
    """A step is what all answers of a batch wait for: its mean keeps the objective for tokens."""
    waiting, objective = settings.waiting, settings.slo_of(model).tpot_p95
    return AdmissionLimits(
        waiting.entries, waiting.bytes, tpot=TPOT_MEAN_FACTOR * objective if objective else float("inf")
    )


def tiers_from_settings(settings: GatewaySettings, model: str) -> list[PriorityTier]:
    """Those of the settings, or the one that all are in."""
    objective = settings.slo_of(model).ttft_p95
    first = TTFT_WAIT_FACTOR * objective if objective else DEFAULT_MAX_WAIT
    return [
        PriorityTier(name, one.weight, one.share, one.max_wait or (DEFAULT_MAX_WAIT if at else first))
        for at, (name, one) in enumerate(settings.tiers.items())
    ] or [PriorityTier(DEFAULT_TIER_NAME, max_wait=first)]
