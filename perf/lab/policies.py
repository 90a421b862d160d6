"""Cost and effect of the routing and admission policies.

Goals: a choice among 16 replicas in 40 µs, an admission in 15 µs, 90 % of the hit rate of an
unlimited cache, and 80 % of TTFT predictions within 30 %. Each time is the fastest of many runs,
which other processes disturb least. All other figures come from simulated time and are the same on
every machine.
"""

import random
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llmops.gateway.interfaces import QueuedRequest, ReplicaView, RoutingRequest
from llmops.gateway.routing.admission.admission_controller import AdmissionController
from llmops.gateway.routing.admission.tiered_queue import PriorityTier, TieredQueue
from llmops.gateway.routing.cost_model import time_to_first_token
from llmops.gateway.routing.placement.least_cost import LeastCostPolicy
from llmops.gateway.routing.placement.prefix_index import PrefixIndex
from llmops.gateway.routing.replicas.in_flight import InFlightTracker
from llmops.gateway.routing.replicas.load_estimator import LoadEstimator
from llmops.perf.lab.figures import Section
from llmops.perf.simulate.arrivals import ConversationArrivals
from llmops.perf.simulate.engine import EngineSpec, LinearStepTimes
from llmops.perf.simulate.fleet import FleetSpec, SimulatedFleet, SimulationOutcome
from llmops.perf.simulate.replica import SimulatedRequest
from llmops.perf.simulate.totals import sum_up
from llmops.perf.workloads.lengths import parse_lengths

TOKENS, REPLICAS, SHARED = 3000, 16, 2000
TTFT = 0.5
# A simulated replica that reads about 20,000 prompt tokens/s, and takes 30 ms per step when its
# batch is full.
ENGINE = EngineSpec(LinearStepTimes(0.01, 0.0003, 0.00005), blocks=4000, block_tokens=100, max_batch_size=64)
# Conversations of 5 turns with system prompts of 2,000 tokens.
TALK = ConversationArrivals(rate=40.0, seconds=120.0, system=2000, apps=12, think=5.0, block_tokens=100)
# Approximate number of requests per second that 8 replicas of ENGINE answer in time.
FULL = 38.0
# The setup in which Dynamo's and SMG's routers were measured: 4 workers with 2,048 blocks of 16
# tokens and 8 sequences. Figures start after WARM seconds, because spreading requests gains nothing
# while engines are nearly idle.
MOCKER = EngineSpec(LinearStepTimes(0.01, 0.0006, 0.000032), 2048, 16, max_batch_size=8, max_num_tokens=2048)
PEERS = ConversationArrivals(
    15.0, 300.0, parse_lengths("6"), 600, 8, parse_lengths("uniform:90,150"), parse_lengths("uniform:48,80"), 3.0,
    block_tokens=16,
)  # fmt: skip
WARM = 60.0
CONDITIONS = "The choice of a replica, the queue, and their effect on a fleet in simulated time (`llmops simulate`)."


def measure(engine: Path, section: Section) -> None:
    """Add all figures of this benchmark to `section`. `engine` is not used."""
    _times(section)
    _caches(section)
    _fairness(section)
    _predictions(section)


def _times(section: Section) -> None:
    for size in (32, 64):
        cost = 1e6 * _choice(size)
        section.add(f"choice of {REPLICAS} replicas, {TOKENS} tokens in blocks of {size}", cost, "µs", 40.0)
    section.add("admission when nothing waits, with its end", 1e6 * _admission(), "µs", 15.0)
    for batch in (2, 64):
        cost = 1e6 * _state_estimate(batch)
        section.add(f"state of a replica that reports none, batch of {batch}", cost, "µs/token", 1.0)
    section.add("requests simulated per second of CPU", max(_simulated() for _ in range(3)), "", 10_000.0, "least")


def _simulated() -> float:
    """Return the number of simulated requests per second of CPU."""
    began = time.process_time()
    done = _fleet(TALK)
    return len(done.jobs) / (time.process_time() - began)


def _choice(block_tokens: int) -> float:
    """Return the seconds of one choice of a replica.

    The result is the mean over 100 prompts, with the fastest of several runs for each prompt.
    """
    rng = random.Random(1)
    views = [
        ReplicaView(f"10.0.0.{at}:8001", state="ready", running=rng.randrange(30), free_blocks=900, blocks=1000,
                    tokens_per_block=block_tokens, prefill_rate=2e4, step_seconds=0.02, max_batch_size=64)
        for at in range(REPLICAS)
    ]  # fmt: skip
    heads = [[rng.randrange(1 << 17) for _ in range(SHARED)] for _ in range(20)]
    prompts = [heads[at % 20] + [rng.randrange(1 << 17) for _ in range(TOKENS - SHARED)] for at in range(200)]
    wanted = [RoutingRequest(TOKENS, struct.pack(f"{TOKENS}i", *ids), 400) for ids in prompts]
    policy = LeastCostPolicy(PrefixIndex(), rng)
    for one in wanted[:100]:
        place = policy.choose(one, views)
        assert place is not None
        policy.sent(one, views[place])
    rest = wanted[100:]
    return sum(_fastest(lambda one=one: policy.choose(one, views)) for one in rest) / len(rest)  # type: ignore[misc]


def _fastest(what: Callable[[], object], times: int = 20) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        what()
        found.append(time.perf_counter() - began)
    return min(found)


class _First:
    """A policy without cost, which always chooses the first replica."""

    def choose(self, *_: object) -> int:
        return 0

    def cached(self, *_: object) -> int:
        return 0

    def sent(self, *_: object) -> None: ...


def _state_estimate(batch: int) -> float:
    """Return the CPU seconds per token of the state estimate for replicas without step messages."""
    view = ReplicaView("a", state="ready", max_batch_size=batch)
    in_flight = InFlightTracker(view)
    estimator = LoadEstimator(view, in_flight)
    running = [in_flight.add(TOKENS, is_counted=False, prompt=TOKENS) for _ in range(batch)]
    for request in running:
        estimator.record_sent(request, 0.0)
    now = 0.0

    steps = 1000

    def decode() -> None:
        nonlocal now
        for _ in range(steps):
            now += 0.02
            for request in running:
                estimator.record_tokens(request, 1, now)

    return _fastest(decode, 5) / (steps * batch)


def _admission() -> float:
    view = ReplicaView("a", state="ready", blocks=1000, free_blocks=900, prefill_rate=2e4, step_seconds=0.02)
    controller = AdmissionController(
        TieredQueue([PriorityTier("interactive"), PriorityTier("standard"), PriorityTier("batch")]),
        _First(),  # type: ignore[arg-type]
    )

    def once() -> None:
        request = QueuedRequest("tenant", RoutingRequest(TOKENS, answer=400), 0.0, "standard")
        controller.try_dispatch(request, [view], 0.0)
        controller.finish(request, 300)
        view.in_flight = view.in_flight_tokens = 0

    return _fastest(once, 2000)


def _fleet(
    work: ConversationArrivals, engine: EngineSpec = ENGINE, replicas: int = 8, **fields: object
) -> SimulationOutcome:
    spec = FleetSpec(engine, replicas, **{"tiers": (PriorityTier("standard", max_wait=TTFT),), **fields})  # type: ignore[arg-type]
    return SimulatedFleet(spec).run(work.arrivals())


def _caches(section: Section) -> None:
    found = sum_up(_fleet(PEERS, MOCKER, 4, policy="cheapest", tiers=()), WARM)
    section.add("hit rate relative to an unlimited cache", 100 * found.hit_rate / found.ceiling, "%", 90.0, "least")
    section.add("busiest of 4 replicas over the mean", found.imbalance, "", 1.3)
    one, two = (sum_up(_fleet(TALK, gateways=count)).hit_rate for count in (1, 2))
    section.add("hit rate lost with two gateways", 100 * (1 - two / one), "%", 2.0)


def _fairness(section: Section) -> None:
    greedy = _fleet(replace(TALK, rate=FULL * 4, tenants=4, flood=2.0), tiers=(PriorityTier("standard", max_wait=5.0),))
    section.add("Jain's index of tokens in overload, one tenant at twice the load",
                sum_up(greedy).jain, "", 0.95, "least")  # fmt: skip


class _Predicting(SimulatedFleet):
    """A fleet that records the predicted time to the first token of each arriving request."""

    def __init__(self, spec: FleetSpec) -> None:
        super().__init__(spec)
        self.said: list[tuple[SimulatedRequest, float]] = []

    def _enter(self, job: SimulatedRequest) -> None:
        gateway = self._gateways[0]
        place = gateway.policy.choose(job.queued_request.routing, gateway.views)
        if place is not None:
            view = gateway.views[place]
            uncached = max(job.tokens - gateway.policy.cached(job.queued_request.routing, view), 1)
            self.said.append((job, time_to_first_token(view, uncached, job.answer)))
        super()._enter(job)


def _predictions(section: Section) -> None:
    fleet = _Predicting(FleetSpec(ENGINE, 8, tiers=(PriorityTier("standard", max_wait=TTFT),)))
    fleet.run(replace(TALK, rate=0.8 * FULL).arrivals())
    near = [abs(said / (job.first - job.arrived) - 1) <= 0.3 for job, said in fleet.said if job.first >= 0]
    section.add("predictions of TTFT within 30 %, load 0.8", 100 * sum(near) / len(near), "%", 80.0, "least")
