"""The steady state: Little's law, order, and an event-by-event simulation of in-flight batching."""

import random
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest

from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.search.candidate import spare_replicas
from llmops.build.plan.speed.disaggregated import WorkerPool, match_workers, prefill_latency, prefill_worker
from llmops.build.plan.speed.replica_model import ReplicaModel, highest_point
from llmops.build.plan.speed.step_time import Prefill, StepModel
from llmops.build.plan.speed.workload import PlanWorkload
from llmops.build.plan.timing.roofline import RooflineTimes
from llmops.build.quant_formats import FORMATS

H100 = RooflineTimes(find_gpu("h100-sxm"))


def replica(models, workload: PlanWorkload, batch: int = 256, pp: int = 1) -> ReplicaModel:
    steps = StepModel(models.LLAMA31_8B, FORMATS["fp8"], "fp8", ParallelLayout(pp=pp), H100)
    return ReplicaModel(steps, workload, batch, 8192)


def test_littles_law(models):
    """Sequences in flight = requests/s x seconds each spends decoding."""
    point = replica(models, PlanWorkload(1000, 200)).at(40)
    assert point.rate * 200 * point.tpot == pytest.approx(40)
    assert point.tokens_per_second == pytest.approx(point.rate * 200)


def test_more_in_flight_is_slower_for_each_and_more_in_all(models):
    points = [replica(models, PlanWorkload(1000, 200)).at(count) for count in (1, 4, 16, 64, 200)]
    assert [p.tpot for p in points] == sorted(p.tpot for p in points)
    assert [p.rate for p in points] == sorted(p.rate for p in points)
    assert all(p.tpot_p95 >= p.tpot and p.ttft_p95 >= p.ttft for p in points)


def test_a_prefix_cache_shortens_the_first_token(models):
    cold, warm = (replica(models, PlanWorkload(4000, 200, prefix_hit=hit)).at(16) for hit in (0.0, 0.9))
    assert warm.ttft < cold.ttft / 2
    assert warm.rate > cold.rate


def test_drafts_that_are_accepted_speed_up_a_small_batch(models):
    plain = replica(models, PlanWorkload(1000, 200)).at(4)
    good, useless = (replica(models, PlanWorkload(1000, 200, draft_tokens=3, acceptance=a)).at(4) for a in (0.8, 0.0))
    drafts = PlanWorkload(1000, 200, draft_tokens=3, acceptance=0.8)
    assert drafts.tokens_per_step == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert good.tpot < plain.tpot < useless.tpot
    clockwork = replica(models, drafts).at(4, bursts=False)
    assert clockwork.tpot_p95 == clockwork.tpot, "without bursts the worst case is the mean"


def test_chunks_trade_the_first_token_for_shorter_pauses(models):
    steps = replica(models, PlanWorkload(8000, 200)).steps
    whole = ReplicaModel(steps, PlanWorkload(8000, 200, chunked_prefill=False), 256, 16384).at(4)
    chunked = ReplicaModel(steps, PlanWorkload(8000, 200), 256, 1024).at(4)
    assert chunked.pause < whole.pause / 3
    assert chunked.ttft > whole.ttft


def test_stages_do_not_change_the_work_but_delay_a_token(models):
    one, two = (replica(models, PlanWorkload(1000, 200), pp=pp).at(64) for pp in (1, 2))
    assert two.rate > one.rate
    assert two.per_gpu < one.per_gpu


def test_highest_stops_at_the_target(models):
    machine = replica(models, PlanWorkload(1000, 200))
    found = highest_point(machine.at, 250, lambda point: point.tpot_p95 <= 0.015)
    assert found is not None
    assert found.tpot_p95 <= 0.015 < machine.at(found.concurrency * 1.03).tpot_p95
    assert highest_point(machine.at, 250, lambda point: point.tpot_p95 <= 1e-4) is None


@pytest.mark.parametrize("concurrency", [8, 40, 90])
def test_simulated_traffic_agrees(models, concurrency):
    """Poisson arrivals into an engine that batches in flight, every step timed by the same step model: the formulas
    are within 15 %."""
    load = PlanWorkload(1000, 200)
    machine = replica(models, load)
    point = machine.at(concurrency)
    ttft, tpot, whole = simulate(machine, point.rate, requests=4000)
    assert sum(tpot) / len(tpot) == pytest.approx(point.tpot, rel=0.15)
    assert percentile(tpot, 95) == pytest.approx(point.tpot_p95, rel=0.15)
    assert sum(ttft) / len(ttft) == pytest.approx(point.ttft, rel=0.15)
    assert percentile(ttft, 95) == pytest.approx(point.ttft_p95, rel=0.15)
    assert percentile(ttft, 50) <= 1.1 * point.ttft_p50
    assert percentile(whole, 50) == pytest.approx(point.e2e_p50, rel=0.15)
    assert percentile(whole, 95) == pytest.approx(point.e2e_p95, rel=0.15)


def simulate(machine: ReplicaModel, rate: float, requests: int) -> tuple[list[float], list[float], list[float]]:
    """TTFT, TPOT and whole time of each request, the first tenth (filling up) left out."""
    draw, load, now = random.Random(7), machine.workload, 0.0
    arrivals = deque()
    for _ in range(requests):
        now += draw.expovariate(rate)
        arrivals.append(now)
    clock, running, ttft, tpot, whole = 0.0, [], [], [], []
    while arrivals or running:
        if not running and arrivals[0] > clock:
            clock = arrivals[0]
        room = min((machine.max_num_tokens - len(running)) // load.isl, machine.max_batch - len(running))
        admitted = []
        while arrivals and arrivals[0] <= clock and len(admitted) < room:
            admitted.append(arrivals.popleft())
        prefill = Prefill(len(admitted), load.isl) if admitted else None
        clock += machine.steps.seconds(len(running), load.isl + load.osl // 2, prefill)
        for request in running:
            request[1] -= 1
            if request[1] == 0:
                tpot.append((clock - request[0]) / (load.osl - 1))
                whole.append(clock - request[2])
        running = [request for request in running if request[1] > 0]
        for arrival in admitted:
            ttft.append(clock - arrival)
            running.append([clock, load.osl - 1, arrival])
    skip = requests // 10
    return ttft[skip:], tpot[skip:], whole[skip:]


@pytest.mark.parametrize(
    ("needed", "gpus", "availability", "spares"),
    [(8, 1, None, 0), (8, 1, 0.9999, 1), (1, 8, 0.9999, 1), (1, 8, 0.9, 0), (800, 8, 0.999, 2)],
)
def test_spare_replicas_make_an_availability(needed, gpus, availability, spares):
    assert spare_replicas(needed, gpus, availability) == spares


def percentile(values: list[float], share: int) -> float:
    return sorted(values)[int(len(values) * share / 100)]


# -- The formulas behind latencies, against textbook results and steps whose time is known


PREFILL = WorkerPool(ParallelLayout(tp=2), rate=3.0, latency=0.4, latency_p95=0.7, gpus=2, service=0.25, unloaded=0.3)
DECODE = WorkerPool(ParallelLayout(tp=4), rate=2.0, latency=0.01, latency_p95=0.02, gpus=4)


class Clockwork:
    """Steps of 10 ms; a prompt's token adds 0.1 ms."""

    def __init__(self, model, pp: int = 1) -> None:
        self.model, self.kv, self.layout = model, "bf16", ParallelLayout(pp=pp)

    def seconds(self, batch, length, prefill=None, drafts=0):
        return 0.01 * (batch > 0) + (prefill.prompts * prefill.tokens * 1e-4 if prefill else 0.0)


NETWORK = SimpleNamespace(send=lambda bytes_, nodes: bytes_ / (50e9 if nodes else 450e9))


def machine(models, load: PlanWorkload) -> ReplicaModel:
    return ReplicaModel(Clockwork(models.LLAMA31_8B), load, 64, 8192, True)


def test_the_mean_wait_is_that_of_an_md1_queue():
    """Pollaczek and Khinchine at 80 %: half of service x 0.8 / 0.2. A simulated queue agrees, in its tail too."""
    mean, p95, p99 = prefill_latency(0.1, 0.15, 8.0)
    assert mean == pytest.approx(0.15 + 0.1 * 0.8 / (2 * 0.2))
    draw, arrival, free, waits = random.Random(3), 0.0, 0.0, []
    for _ in range(200_000):
        arrival += draw.expovariate(8.0)
        waits.append(max(0.0, free - arrival))
        free = max(free, arrival) + 0.1
    waits.sort()
    assert sum(waits) / len(waits) == pytest.approx(mean - 0.15, rel=0.05)
    assert waits[int(0.95 * len(waits))] == pytest.approx(p95 - 0.15, rel=0.1)
    assert waits[int(0.99 * len(waits))] == pytest.approx(p99 - 0.15, rel=0.1)


@pytest.mark.parametrize("target", [0.15, 0.3, 0.6])
def test_a_prefill_worker_is_as_busy_as_its_target_allows(models, target):
    worker = prefill_worker(machine(models, PlanWorkload(1000, 200, ttft_p95=target)), NETWORK)
    assert worker.latency_p95 == pytest.approx(target, rel=1e-3)
    busier = prefill_latency(worker.service, worker.unloaded, worker.rate * 1.02)
    assert busier[1] > target


def test_ratios():
    """3 and 2 requests/s: two prefill workers of 2 GPUs feed three decode workers of 4 without loss."""
    best = match_workers(PREFILL, DECODE, None, 64)
    assert (best.prefill_count, best.decode_count) == (2, 3)
    assert best.rate / best.gpus == pytest.approx(6 / 16)
    small = match_workers(PREFILL, DECODE, None, 6)
    assert (small.prefill_count, small.decode_count) == (1, 1)
    assert match_workers(PREFILL, DECODE, None, 5) is None
    asked = match_workers(PREFILL, DECODE, 7.0, 64)
    assert (asked.prefill_count, asked.decode_count, asked.gpus) == (3, 4, 22)
    assert match_workers(PREFILL, DECODE, 7.0, 22) is not None
    assert match_workers(PREFILL, DECODE, 7.0, 21) is None
    slow = replace(PREFILL, rate=0.25)
    # eight of a kind at most
    assert match_workers(slow, DECODE, None, 64).prefill_count == 8


def test_the_steady_state_of_clockwork(models):
    """40 sequences: each step of 10 ms lets in 0.2 prompts of 0.1 s, so a token takes 30 ms on average."""
    point = machine(models, PlanWorkload(1000, 200)).at(40, bursts=False)
    assert point.tpot == point.tpot_p95 == pytest.approx(0.03)
    assert (point.rate, point.tokens_per_second) == (pytest.approx(40 / (200 * 0.03)), pytest.approx(40 / 0.03))
    assert (point.prefill_share, point.gpus) == (pytest.approx(2 / 3), 1)
    # the longest pause: a step with a whole prompt
    assert point.pause == pytest.approx(0.11)
