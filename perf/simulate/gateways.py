"""Gateways in the simulation: the product's own gate and policy, each with its own view of the replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llmops.gateway.fleet.admission.gate import Gate
from llmops.gateway.fleet.admission.order import Tier, Tiers
from llmops.gateway.fleet.cost import uncached_tokens
from llmops.gateway.messages import Policy, ReplicaView
from llmops.perf.simulate.clock import Clock
from llmops.perf.simulate.job import Job
from llmops.perf.simulate.replica import Replica


class Gateway:
    """Without a gate every request goes to a replica at once."""

    def __init__(
        self, clock: Clock, policy: Policy, gate: Gate | None, views: Sequence[ReplicaView], done: Callable[[Job], None]
    ) -> None:
        self.clock, self.policy, self.gate, self.views = clock, policy, gate, views
        self.replicas: Mapping[str, Replica] = {}
        # who waits
        self.order = Tiers([Tier("")]) if gate is None else gate.order
        self._done = done
        if gate is not None:
            gate.look(views, 0.0)

    def arrive(self, job: Job) -> None:
        gate, ticket, now = self.gate, job.ticket, self.clock.now
        if gate is None:
            place = self.policy.choose(ticket.wanted, self.views, now)
            self._send(job, place)
            return
        place = gate.at_once(ticket, self.views, now)
        if place is not None:
            self.replicas[self.views[place].replica_id].submit(job)
            return
        wait = gate.refusal(ticket, self.views, now)
        if wait is not None:
            self._refuse(job, wait)
            return
        for out in gate.push(ticket, self.views, now):
            self._refuse(out.what, gate.queued(out, self.views))
        if not ticket.moved:
            self.clock.at(now + gate.limit(ticket, now), self._late, job)
        self.pump()

    def pump(self) -> None:
        """Somewhere may be room."""
        gate = self.gate
        if gate is None:
            return
        while (placed := gate.next(self.views, self.clock.now)) is not None:
            self.replicas[self.views[placed.place].replica_id].submit(placed.ticket.what)

    def look(self) -> None:
        """Replicas came or went."""
        if self.gate is not None:
            self.gate.look(self.views, self.clock.now)
            self.pump()

    def ended(self, job: Job) -> None:
        if self.gate is not None:
            self.gate.ended(job.ticket, job.answer)

    def _send(self, job: Job, place: int | None) -> None:
        if place is None:
            job.failed, job.end = True, self.clock.now
            self._done(job)
            return
        view = self.views[place]
        view.unseen += 1
        view.unseen_tokens += uncached_tokens(self.policy, job.ticket.wanted, view)
        self.policy.sent(job.ticket.wanted, view)
        self.replicas[view.replica_id].submit(job)

    def _late(self, job: Job) -> None:
        if self.gate is not None and self.gate.remove(job.ticket, self.clock.now):
            self._refuse(job, self.gate.queued(job.ticket, self.views))

    def _refuse(self, job: Job, wait: float) -> None:
        job.refused, job.end = max(wait, 0.0), self.clock.now
        self._done(job)
