"""Simulated gateways with the product's own admission and routing.

Each gateway has its own view of the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from llmops.gateway.interfaces import ReplicaView, RoutingPolicy
from llmops.gateway.routing.admission.admission_controller import AdmissionController
from llmops.gateway.routing.admission.degradation import FALL_SECONDS, Degradation
from llmops.gateway.routing.admission.tiered_queue import PriorityTier, TieredQueue
from llmops.gateway.routing.cost_model import uncached_tokens
from llmops.gateway.routing.replicas.in_flight import InFlightRequest, InFlightTracker
from llmops.gateway.routing.replicas.load_estimator import LoadEstimator
from llmops.perf.simulate.clock import Clock
from llmops.perf.simulate.replica import SimulatedReplica, SimulatedRequest


class SimulatedGateway:
    """A simulated gateway.

    Without an admission controller, every request goes to a replica at once.
    """

    def __init__(
        self,
        clock: Clock,
        policy: RoutingPolicy,
        controller: AdmissionController | None,
        views: Sequence[ReplicaView],
        done: Callable[[SimulatedRequest], None],
        is_measured: bool = False,
        degradation: Degradation | None = None,
    ) -> None:
        self.clock, self.policy, self.controller, self.views = clock, policy, controller, views
        self.replicas: Mapping[str, SimulatedReplica] = {}
        # The queue of requests for which no replica has room.
        self.order = TieredQueue([PriorityTier("")]) if controller is None else controller.queue
        self._done, self._degradation = done, degradation
        # The load estimates of replicas that report no state, and the requests in flight.
        self._unseen = {view.replica_id: InFlightTracker(view) for view in views} if is_measured else {}
        self._measured = {name: LoadEstimator(in_flight.view, in_flight) for name, in_flight in self._unseen.items()}
        self._sent: dict[SimulatedRequest, InFlightRequest] = {}
        if controller is not None:
            controller.update_views(views, 0.0)

    def update_degradation(self) -> None:
        """Update the level of degraded mode."""
        if self._degradation is not None and self.controller is not None:
            self._degradation.update({"": self.controller.saturation(self.views)})

    def arrive(self, job: SimulatedRequest) -> None:
        limits = None
        if self._degradation is not None and not job.moves:
            limits = self._degradation.limits("", job.tier, partial(self._has_waiting, job))
        if limits is not None:
            if limits.is_shed or (limits.prompt_tokens is not None and job.tokens > limits.prompt_tokens):
                self._refuse(job, FALL_SECONDS)
                return
            job.shorten(limits.max_tokens)
        controller, queued_request, now = self.controller, job.queued_request, self.clock.now
        if controller is None:
            place = self.policy.choose(queued_request.routing, self.views)
            self._send(job, place)
            return
        place = controller.try_dispatch(queued_request, self.views, now)
        if place is not None:
            self._submit(job, self.views[place])
            return
        wait = controller.excessive_wait(queued_request, self.views, now)
        if wait is not None:
            self._refuse(job, wait)
            return
        for out in controller.push(queued_request, self.views, now):
            self._refuse(out.payload, controller.queue_wait(out, self.views))
        if not queued_request.moved:
            self.clock.at(now + max(controller.max_wait(queued_request, now), 0.0), self._late, job)
        if queued_request.home_until > now:
            # A real engine reports each step. Simulated replicas report only changes, which may be
            # seconds apart.
            self.clock.at(queued_request.home_until, self.pump)
        self.pump()

    def _has_waiting(self, job: SimulatedRequest) -> bool:
        return self.controller is not None and self.controller.queue.has_waiting(job.queued_request.tenant)

    def pump(self) -> None:
        """Send queued requests as long as a replica has room."""
        controller = self.controller
        if controller is None:
            return
        while (placed := controller.dispatch_next(self.views, self.clock.now)) is not None:
            self._submit(placed.request.payload, self.views[placed.replica_index])

    def look(self) -> None:
        """Tell the admission controller which replicas are available."""
        if self.controller is not None:
            self.controller.update_views(self.views, self.clock.now)
            self.pump()

    def token(self, job: SimulatedRequest) -> None:
        """Record a token of a replica that reports no state."""
        if self._measured[job.replica].record_tokens(self._sent[job], 1, self.clock.now):
            self.pump()

    def scrape(self) -> None:
        """Read the gauges of all replicas that report no state."""
        for name, measured in self._measured.items():
            replica, view = self.replicas[name], self._unseen[name].view
            if view.state == "ready":
                measured.update_gauges(replica.gauges, self.clock.now)
                self.policy.limit(name, replica.cache.blocks)

    def left(self, job: SimulatedRequest) -> None:
        """Remove a request from the load of its replica."""
        sent = self._sent.pop(job, None)
        if sent is not None:
            self._unseen[job.replica].remove(sent)
            self._measured[job.replica].record_end(sent)

    def ended(self, job: SimulatedRequest) -> None:
        if job in self._sent:
            self.left(job)
            self.policy.stored(job.replica, [*job.hashes, *job.after])
        if self.controller is not None:
            self.controller.finish(job.queued_request, job.answer)
        if self._measured:
            self.pump()

    def _send(self, job: SimulatedRequest, place: int | None) -> None:
        if place is None:
            job.failed, job.end = True, self.clock.now
            self._done(job)
            return
        view = self.views[place]
        job.queued_request.uncached_tokens = uncached_tokens(self.policy, job.queued_request.routing, view)
        view.in_flight += 1
        view.in_flight_tokens += job.queued_request.uncached_tokens
        self.policy.sent(job.queued_request.routing, view)
        self._submit(job, view)

    def _submit(self, job: SimulatedRequest, view: ReplicaView) -> None:
        measured = self._measured.get(view.replica_id)
        if measured is not None:
            sent = self._unseen[view.replica_id].add(
                job.queued_request.uncached_tokens, is_counted=True, prompt=job.known_tokens
            )
            self._sent[job] = sent
            measured.record_sent(sent, self.clock.now)
        self.replicas[view.replica_id].submit(job)

    def _late(self, job: SimulatedRequest) -> None:
        if self.controller is not None and self.controller.remove(job.queued_request, self.clock.now):
            self._refuse(job, self.controller.queue_wait(job.queued_request, self.views))

    def _refuse(self, job: SimulatedRequest, wait: float) -> None:
        if self.controller is not None:
            wait = self.controller.retry_after(job.queued_request, max(wait, 0.0), self.views, self.clock.now)
        job.refused, job.end = max(wait, 0.0), self.clock.now
        self._done(job)
