"""A simulated fleet of equal replicas behind one or more gateways."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from itertools import pairwise

from llmops.gateway.interfaces import QueuedRequest, RoutingRequest
from llmops.gateway.routing.admission.admission_controller import AdmissionController, AdmissionLimits
from llmops.gateway.routing.admission.degradation import Degradation, DegradationRules, DegradedLevel
from llmops.gateway.routing.admission.request_queue import POLL_INTERVAL
from llmops.gateway.routing.admission.tiered_queue import PriorityTier, TieredQueue
from llmops.gateway.routing.replicas.gauge_scraper import SCRAPE_INTERVAL
from llmops.perf.simulate.autoscaler import Autoscaler, AutoscalingSpec
from llmops.perf.simulate.clock import Clock
from llmops.perf.simulate.engine import EngineSpec
from llmops.perf.simulate.gateways import SimulatedGateway
from llmops.perf.simulate.policies import POLICIES
from llmops.perf.simulate.replica import ReplicaVariation, SimulatedReplica, SimulatedRequest
from llmops.perf.simulate.rollout import SimulatedRollout

#: Seconds over which autoscaling averages the request rate, as the chart's Prometheus query does.
RATE_SECONDS = 120.0
# A function that returns the seconds until the next request of a finished request's session, and
# that request, or None.
Next = Callable[[SimulatedRequest], "tuple[float, SimulatedRequest] | None"]
# A function that is called after every PROGRESS_EVERY requests with the simulated seconds and the
# number of finished requests.
OnProgress = Callable[[float, int], None] | None
PROGRESS_EVERY = 1000
#: Seconds between two updates of degraded mode.
DEGRADATION_INTERVAL = 1.0


@dataclass(frozen=True)
class Arrivals:
    """A workload: requests in order of arrival, and a function for the next requests of sessions."""

    jobs: Iterator[SimulatedRequest]
    next: Next = lambda _: None

    def joined(self, other: Arrivals) -> Arrivals:
        """Return a workload with the requests of both.

        The sessions of `other` have negative numbers.
        """
        jobs = merge(self.jobs, other.jobs, key=lambda job: job.arrived)
        return Arrivals(jobs, lambda last: (other if last.session < 0 else self).next(last))


@dataclass(frozen=True)
class ReplicaFailure:
    """A failure of a replica.

    Attributes:
        replica: The number of the replica.
        at: The time of the failure, in seconds.
        back: The number of seconds after which the replica is back.
    """

    replica: int
    at: float
    back: float = 120.0


@dataclass(frozen=True)
class FleetSpec:
    """The settings of a simulated fleet.

    Attributes:
        engine: The engine of each replica.
        replicas: Number of replicas.
        policy: Name of the routing policy.
        tiers: Priority tiers of the admission queue. An empty tuple disables queueing.
        gateways: Number of gateways.
        failures: Planned failures.
        bounds: Limits of the admission queue.
        seed: Seed of the random numbers.
        scaling: Settings of autoscaling, or None.
        measured: True if replicas report no state, so that gateways estimate it.
        noise: Noise of step times, see ReplicaVariation.
        degraded: Settings of the gateways' degraded mode, or None.
        outage: Times in seconds at which all replicas fail and are back, or None.
        rollout: Time in seconds at which a roll-out to the same number of new replicas begins, or
            None.
        slow: Factors of the step times of some replicas, by the replica's number.
    """

    engine: EngineSpec
    replicas: int
    policy: str = "cheapest"
    tiers: Sequence[PriorityTier] = (PriorityTier("standard"),)
    gateways: int = 1
    failures: Sequence[ReplicaFailure] = ()
    bounds: AdmissionLimits | None = None
    seed: int = 0
    scaling: AutoscalingSpec | None = None
    measured: bool = False
    noise: float = 0.0
    degraded: DegradationRules | None = None
    outage: tuple[float, float] | None = None
    rollout: float | None = None
    slow: Mapping[int, float] = field(default_factory=dict)


@dataclass
class SimulationOutcome:
    """The outcome of a simulated run.

    Attributes:
        spec: The fleet's settings.
        jobs: The requests.
        seconds: The duration of the run.
        busy: Seconds in which each replica worked.
        queues: Longest queue inside each engine.
        scaled: Time of each change of the number of replicas, and the new number.
        degraded: Time of each change of the level of degraded mode, and the new level.
        rollout: Time of each change of the new version's percentage, and the new percentage.
    """

    spec: FleetSpec
    jobs: list[SimulatedRequest] = field(default_factory=list)
    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    queues: dict[str, int] = field(default_factory=dict)
    scaled: list[tuple[float, int]] = field(default_factory=list)
    degraded: list[tuple[float, int]] = field(default_factory=list)
    rollout: list[tuple[float, float]] = field(default_factory=list)

    def replica_seconds(self, since: float, until: float) -> float:
        """Return the replica-seconds between two times. Replicas that are starting count."""
        changes = [*self.scaled, (until, 0)] if self.scaled else [(0.0, self.spec.replicas), (until, 0)]
        return sum(
            count * max(min(ends, until) - max(begins, since), 0.0) for (begins, count), (ends, _) in pairwise(changes)
        )


class SimulatedFleet:
    """A simulated fleet during one run."""

    def __init__(self, spec: FleetSpec, on_progress: OnProgress = None) -> None:
        self.spec, self.clock, self.outcome, self._on_progress = spec, Clock(), SimulationOutcome(spec), on_progress
        self._rng = random.Random(f"fleet {spec.seed}")
        names = [f"replica-{number}" for number in range(spec.replicas)]
        new = [f"new-{number}" for number in range(spec.replicas)] if spec.rollout is not None else []
        self.replicas = {name: self._replica(number, name) for number, name in enumerate([*names, *new])}
        self._gateways = [self._gateway(number, names) for number in range(spec.gateways)]
        # Each gateway has a queue and a prefix index per version.
        self._of_version = dict.fromkeys(names, self._gateways)
        self._rollout: SimulatedRollout | None = None
        if new:
            old, own = self._gateways, [self._gateway(spec.gateways + number, new) for number in range(spec.gateways)]
            self._of_version = dict.fromkeys(names, old) | dict.fromkeys(new, own)
            self._gateways = [*old, *own]
            self._rollout = SimulatedRollout(self.clock, partial(self._fail_all, names))
        self._next: Next = lambda _: None
        self._came: deque[float] = deque()

    def run(self, work: Arrivals) -> SimulationOutcome:
        self._next = work.next
        self._arrive(work.jobs)
        if self.spec.measured:
            for gateway in self._gateways:
                self.clock.every(SCRAPE_INTERVAL, gateway.scrape)
                self.clock.every(POLL_INTERVAL, gateway.pump)
        if self.spec.degraded is not None:
            for gateway in self._gateways:
                self.clock.every(DEGRADATION_INTERVAL, gateway.update_degradation)
        for failure in self.spec.failures:
            self._plan(failure)
        if self.spec.outage is not None:
            begin, end = self.spec.outage
            self.clock.at(begin, self._fail_all, list(self.replicas))
            for name in self.replicas:
                self.clock.at(end, self.set, name, "ready")
        if self._rollout is not None and self.spec.rollout is not None:
            self.clock.at(self.spec.rollout, self._rollout.start)
        if self.spec.scaling is not None:
            AutoscaledFleet(self, self.spec.scaling).begin()
        # A run makes no cyclic garbage, and the search for garbage would take a third of the time.
        gc.disable()
        try:
            self.clock.run()
        finally:
            # Freezing and unfreezing moves all objects to the oldest generation, so that the
            # collector does not search them as soon as it is on again.
            gc.freeze()
            gc.unfreeze()
            gc.enable()
        done = self.outcome
        done.seconds = max((job.end for job in done.jobs), default=0.0)
        done.busy = {name: one.busy for name, one in self.replicas.items()}
        done.rollout = [] if self._rollout is None else self._rollout.steps[1:]
        done.queues = {name: int(one.longest_queue) for name, one in self.replicas.items()}
        return done

    def sums(self) -> dict[str, float]:
        """Return the metrics for autoscaling, each summed over the replicas.

        The metrics are requests without a first token, used shares of KV caches, and requests/s.
        """
        waiting = sum(one.waiting for one in self.replicas.values())
        waiting += sum(len(one.controller.queue) for one in self._gateways if one.controller is not None)
        ready = [one.views[0] for one in self.replicas.values() if one.views[0].state == "ready"]
        while self._came and self._came[0] <= self.clock.now - RATE_SECONDS:
            self._came.popleft()
        return {
            "waiting": waiting,
            "kv": sum(1 - view.free_blocks / view.blocks for view in ready),
            "requests": len(self._came) / RATE_SECONDS,
        }

    def _replica(self, number: int, name: str) -> SimulatedReplica:
        spec = self.spec
        conduct = ReplicaVariation(not spec.measured, spec.noise, spec.slow.get(number, 1.0), f"steps {spec.seed}")
        token = (lambda job: self._gateways[job.gateway].token(job)) if spec.measured else (lambda job: None)
        return SimulatedReplica(name, spec.engine, self.clock, self._ended, self._changed, conduct, token)

    def _gateway(self, number: int, names: Sequence[str]) -> SimulatedGateway:
        spec = self.spec
        views = [self.replicas[name].view() for name in names]
        for view in views:
            view.subscribers = spec.gateways
        policy = POLICIES[spec.policy](random.Random(f"policy {spec.seed} {number}"))
        rng = random.Random(f"gate {spec.seed} {number}")
        controller = AdmissionController(TieredQueue(spec.tiers), policy, spec.bounds, rng) if spec.tiers else None
        degradation = None
        if spec.degraded is not None:
            degradation = Degradation(spec.degraded, clock=lambda: self.clock.now, on_level=self._degraded)
        gateway = SimulatedGateway(self.clock, policy, controller, views, self._finished, spec.measured, degradation)
        gateway.replicas = self.replicas
        return gateway

    def _degraded(self, _: str, level: DegradedLevel) -> None:
        self.outcome.degraded.append((self.clock.now, level))

    def _arrive(self, jobs: Iterator[SimulatedRequest]) -> None:
        """Schedule the next arrival.

        Each arrival schedules the arrival after it, because `jobs` may be endless.
        """
        job = next(jobs, None)
        if job is not None:
            self.clock.at(job.arrived, self._came_of, jobs, job)

    def _came_of(self, jobs: Iterator[SimulatedRequest], job: SimulatedRequest) -> None:
        self._arrive(jobs)
        self._enter(job)

    def _enter(self, job: SimulatedRequest) -> None:
        if self.spec.scaling is not None:
            self._came.append(self.clock.now)
        count = self.spec.gateways
        job.gateway = self._rng.randrange(count) if count > 1 else 0
        if self._rollout is not None and self._rollout.is_candidate(job):
            job.gateway += count
        self._gateways[job.gateway].arrive(job)

    def _ended(self, job: SimulatedRequest) -> None:
        self._gateways[job.gateway].ended(job)
        if self._rollout is not None:
            self._rollout.observe(job, job.gateway >= self.spec.gateways)
        self._finished(job)

    def _finished(self, job: SimulatedRequest) -> None:
        ended = self.outcome.jobs
        ended.append(job)
        if self._on_progress is not None and len(ended) % PROGRESS_EVERY == 0:
            self._on_progress(self.clock.now, len(ended))
        following = self._next(job)
        if following is not None:
            pause, after = following
            self.clock.at(self.clock.now + pause, self._follow, after)

    def _follow(self, job: SimulatedRequest) -> None:
        job.arrived = job.queued_request.arrived = self.clock.now
        self._enter(job)

    def _changed(self, replica: SimulatedReplica) -> None:
        cache, gateways = replica.cache, self._of_version[replica.name]
        if self.spec.measured:
            cache.added, cache.evicted = [], []
            return
        if len(gateways) > 1:
            total = sum(one.controller.queue.demand() for one in gateways if one.controller)
            for view in replica.views:
                view.demand = total
        if cache.added:
            for gateway in gateways:
                gateway.policy.stored(replica.name, cache.added)
            cache.added = []
        if cache.evicted:
            for gateway in gateways:
                gateway.policy.removed(replica.name, cache.evicted)
            cache.evicted = []
        for gateway in gateways:
            if gateway.order.size:
                gateway.pump()

    def _plan(self, failure: ReplicaFailure) -> None:
        # Each machine has a replica of both versions.
        for name in (f"replica-{failure.replica}", f"new-{failure.replica}"):
            if name in self.replicas:
                self.clock.at(failure.at, self.fail, name)
                self.clock.at(failure.at + failure.back, self.set, name, "ready")

    def fail(self, name: str) -> None:
        """Remove a replica and its cache. The replica's requests continue on other replicas."""
        lost = self.replicas[name].fail()
        for gateway in self._gateways:
            gateway.policy.forget(name)
        for job in lost:
            self._gateways[job.gateway].left(job)
        self.set(name, "gone")
        for job in lost:
            self._continue(job)

    def _fail_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.fail(name)

    def set(self, name: str, state: str) -> None:
        blocks = self.spec.engine.blocks
        for view in self.replicas[name].views:
            view.state = state  # type: ignore[assignment]
            view.running = view.waiting = view.waiting_tokens = view.in_flight = view.in_flight_tokens = 0
            view.free_blocks = blocks
        for gateway in self._gateways:
            gateway.look()

    def _continue(self, job: SimulatedRequest) -> None:
        """Send a request with its tokens so far to another replica, ahead of waiting requests."""
        made = job.made
        job.moves, job.known_tokens = job.moves + 1, job.tokens + made
        known = [*job.hashes, *job.after][: job.known_tokens // self.spec.engine.block_tokens]
        wanted = RoutingRequest(job.known_tokens, answer=job.answer - made, hashes=known)
        job.queued_request = QueuedRequest(job.tenant, wanted, self.clock.now, job.tier, moved=True, payload=job)
        self._gateways[job.gateway].arrive(job)


class AutoscaledFleet:
    """A fleet with an autoscaler that decides every `period`.

    The decisions end when nothing else is scheduled. The newest replica is removed first, as in a
    StatefulSet. The answers of this replica continue on other replicas.
    """

    def __init__(self, fleet: SimulatedFleet, scaling: AutoscalingSpec) -> None:
        self._fleet, self._scaling = fleet, scaling
        self._autoscaler = Autoscaler(scaling)
        self._count = scaling.least
        # Number of starts of each replica. A replica that was removed during its start has another
        # number when the start ends, and does not become ready.
        self._starts = [0] * scaling.most

    def begin(self) -> None:
        for number in range(self._count, self._scaling.most):
            self._fleet.fail(f"replica-{number}")
        self._fleet.outcome.scaled.append((0.0, self._count))
        self._again()

    def _again(self) -> None:
        self._fleet.clock.at(self._fleet.clock.now + self._scaling.period, self._look)

    def _look(self) -> None:
        clock = self._fleet.clock
        recommended = self._autoscaler.replicas(clock.now, self._count, self._fleet.sums())
        if recommended != self._count:
            for number in range(recommended, self._count):
                self._starts[number] += 1
                self._fleet.fail(f"replica-{number}")
            for number in range(self._count, recommended):
                self._start(number)
            self._count = recommended
            self._fleet.outcome.scaled.append((clock.now, recommended))
        if not clock.is_over:
            self._again()

    def _start(self, number: int) -> None:
        self._starts[number] += 1
        start, clock = self._starts[number], self._fleet.clock

        def come() -> None:
            if self._starts[number] == start:
                self._fleet.set(f"replica-{number}", "ready")

        clock.at(clock.now + self._scaling.cold_start, come)
