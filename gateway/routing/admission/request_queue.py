"""Admission of requests on an event loop.

A request waits until a replica has room, or until its wait becomes too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from llmops.gateway.errors import ApiError, ClientDeadlineError, OverloadedError, UnavailableError
from llmops.gateway.interfaces import QueuedRequest, ReplicaView, RoutingPolicy, RoutingRequest, SchedulingParams
from llmops.gateway.routing.admission.admission_controller import AdmissionController, AdmissionLimits
from llmops.gateway.routing.admission.tiered_queue import PriorityTier, TieredQueue
from llmops.gateway.settings import GatewaySettings, Objectives

#: Seconds between two checks of a queue without other events. Slow start and the turns of gateways
#: depend on the time alone.
POLL_INTERVAL = 0.05
#: Name of the tier of callers without a tier.
DEFAULT_TIER_NAME = "standard"
#: Maximum seconds that a request may wait for its first token if the settings set no limit, so that
#: the queue is not filled with requests whose clients have given up.
DEFAULT_MAX_WAIT = 60.0
#: Allowed mean step time as a multiple of the TPOT objective, by the objective's percentile. The
#: mean over an answer varies little between answers, so the factors are close to 1.
TPOT_MEAN_FACTORS = {50: 1.0, 95: 1.0, 99: 0.95}
#: Allowed predicted wait as a multiple of the TTFT objective, by the objective's percentile. Waits
#: have an exponential tail, whose median is 0.23 times the 95th percentile. With twice the load
#: that fits, the 99th percentile is 0.83 of its objective (`llmops simulate`).
TTFT_WAIT_FACTORS = {50: 2.6, 95: 0.6, 99: 0.5}


class RequestQueue:
    """The waiting requests of one model."""

    def __init__(
        self,
        controller: AdmissionController,
        views: Callable[[], Sequence[ReplicaView]],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Create a queue.

        Args:
            controller: The admission control of the model.
            views: Returns the current replicas. Call `update` when they have changed.
            clock: Monotonic clock in seconds.
        """
        self.controller, self._views, self._clock = controller, views, clock
        self._futures: dict[QueuedRequest, asyncio.Future[ReplicaView]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._futures)

    def check(self, request: QueuedRequest) -> None:
        """Reject a request before its prompt is known.

        Raises:
            OverloadedError: The wait for earlier requests alone exceeds the limit of this request.
        """
        if self.controller.queue:
            wait = self.controller.queue_wait(request, self._views())
            if wait > self.controller.max_wait(request, self._clock()):
                raise self._overloaded(request, wait)

    async def enter(self, request: QueuedRequest) -> ReplicaView:
        """Wait until a replica has room and return it. The request then counts as dispatched there.

        Raises:
            OverloadedError: The predicted wait is too long.
            UnavailableError: No replica can take the request.
        """
        now, views = self._clock(), self._views()
        place = self.controller.try_dispatch(request, views, now)
        if place is not None:
            return views[place]
        if not request.home:
            raise UnavailableError("No replica of the model can take this request now; send it again later.")
        wait = self.controller.excessive_wait(request, views, now)
        if wait is not None:
            raise self._overloaded(request, wait)
        return await self._wait(request, views, now)

    def update(self) -> None:
        """Dispatch waiting requests, after a replica changed, came or went, or a request ended."""
        now, views = self._clock(), self._views()
        self.controller.update_views(views, now)
        while (assignment := self.controller.dispatch_next(views, now)) is not None:
            future, view = self._futures.pop(assignment.request), views[assignment.replica_index]
            if future.done():
                self.controller.undo_dispatch(assignment.request, view)
            else:
                future.set_result(view)
        if self._timer is None and self._futures:
            self._timer = asyncio.get_running_loop().call_later(POLL_INTERVAL, self._on_timer)

    def finish(self, request: QueuedRequest, output_tokens: int) -> None:
        """Record that a dispatched request has ended."""
        self.controller.finish(request, output_tokens)
        self.update()

    def close(self) -> None:
        """Fail all waiting requests with UnavailableError."""
        for request in list(self._futures):
            self._reject(request, UnavailableError("The gateway is shutting down; send the request again."))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self, request: QueuedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        loop = asyncio.get_running_loop()
        future = self._futures[request] = loop.create_future()
        timer = None
        try:
            for evicted in self.controller.push(request, views, now):
                self._reject(evicted, self._overloaded(evicted, self.controller.predicted_wait(evicted, views)))
            if not request.moved:
                limit = self.controller.max_wait(request, now)
                timer = loop.call_later(max(limit, 0), self._reject_late, request)
            self.update()
            view: ReplicaView = await future
            return view
        except asyncio.CancelledError:
            self._abandon(request, future)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _abandon(self, request: QueuedRequest, future: asyncio.Future[ReplicaView]) -> None:
        """Remove a request whose client left, from the queue or just after its dispatch."""
        if self._futures.pop(request, None) is not None:
            self.controller.remove(request, self._clock())
        elif future.done() and not future.cancelled() and future.exception() is None:
            self.controller.undo_dispatch(request, future.result())
            self.update()

    def _reject_late(self, request: QueuedRequest) -> None:
        wait = self.controller.queue_wait(request, self._views()) or DEFAULT_MAX_WAIT / 60
        self._reject(request, self._overloaded(request, wait))

    def _reject(self, request: QueuedRequest, error: ApiError) -> None:
        self.controller.remove(request, self._clock())
        future = self._futures.pop(request, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def _overloaded(self, request: QueuedRequest, wait: float) -> OverloadedError:
        now = self._clock()
        retry_after = self.controller.retry_after(request, wait, self._views(), now)
        message = f"The model is overloaded: the predicted wait exceeds its limit. Retry in {retry_after:.1f} s."
        latest = self.controller.tier_deadline(request)
        is_in_time = request.client_deadline < latest and now + wait <= latest
        return (ClientDeadlineError if is_in_time else OverloadedError)(message, retry_after=retry_after)

    def _on_timer(self) -> None:
        self._timer = None
        self.update()


def create_queued_request(
    scheduling: SchedulingParams, routing: RoutingRequest, held_bytes: int = 0, moved: bool = False
) -> QueuedRequest:
    """Return a request to queue, which holds `held_bytes` of memory while it waits.

    `moved` is True for a request that failed over from another replica.
    """
    return QueuedRequest(
        tenant=scheduling.tenant,
        routing=routing,
        arrived=scheduling.arrived,
        tier=scheduling.tier,
        deadline=scheduling.deadline,
        client_deadline=scheduling.deadline,
        bytes=held_bytes,
        moved=moved,
    )


def create_admission_controller(
    settings: GatewaySettings, model: str, policy: RoutingPolicy
) -> AdmissionController | None:
    """Return a model's admission controller, or None if it has neither objectives nor tiers.

    Without a controller, requests are sent to a replica at once.
    """
    if not settings.queues_requests_of(model):
        return None
    queue = TieredQueue(tiers_from_settings(settings, model), default=DEFAULT_TIER_NAME)
    return AdmissionController(queue, policy, admission_limits_from_settings(settings, model))


def admission_limits_from_settings(settings: GatewaySettings, model: str) -> AdmissionLimits:
    """Return the limits of a model.

    The mean step time must meet the strictest objective for time per output token, because all
    tiers share a batch.
    """
    waiting, slo = settings.waiting, settings.slo_of(model)
    limits = [_strictest(one, "tpot", TPOT_MEAN_FACTORS) for one in (slo, *slo.tiers.values())]
    tpot = min((limit for limit in limits if limit is not None), default=float("inf"))
    return AdmissionLimits(entries=waiting.entries, bytes=waiting.bytes, tpot=tpot)


def tiers_from_settings(settings: GatewaySettings, model: str) -> list[PriorityTier]:
    """Return the tiers in the settings, or a default tier.

    The maximum wait of the first tier, and of tiers with their own objectives, follows from the
    objective.
    """
    slo = settings.slo_of(model)
    first_wait = _strictest(slo, "ttft", TTFT_WAIT_FACTORS) or DEFAULT_MAX_WAIT
    found = []
    for at, (name, tier) in enumerate(settings.tiers.items()):
        own = _strictest(slo.tiers.get(name), "ttft", TTFT_WAIT_FACTORS)
        wait = tier.max_wait or own or (DEFAULT_MAX_WAIT if at else first_wait)
        found.append(PriorityTier(name, tier.weight, tier.share, wait))
    return found or [PriorityTier(DEFAULT_TIER_NAME, max_wait=first_wait)]


def _strictest(objectives: Objectives | None, metric: str, factors: Mapping[int, float]) -> float | None:
    """Return the smallest limit of a latency, in seconds, or None without limits.

    Before the comparison, each limit is multiplied by the factor of its percentile.
    """
    limits = objectives.limits(metric) if objectives is not None else {}
    return min((limit * factors[percentile] for percentile, limit in limits.items()), default=None)
