"""The formulas behind latencies, against textbook results and steps whose time is known."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.speed.disaggregated import (
    Disaggregated,
    WorkerPool,
    decode_worker,
    match_workers,
    prefill_latency,
    prefill_worker,
    transfer_seconds,
)
from llmops.build.plan.speed.replica_model import OperatingPoint, ReplicaModel
from llmops.build.plan.speed.workload import PlanWorkload

PREFILL = WorkerPool(ParallelLayout(tp=2), rate=3.0, latency=0.4, latency_p95=0.7, gpus=2, service=0.25, unloaded=0.3)
DECODE = WorkerPool(ParallelLayout(tp=4), rate=2.0, latency=0.01, latency_p95=0.02, gpus=4)


class Clockwork:
    """Steps of 10 ms; a prompt's token adds 0.1 ms."""

    def __init__(self, model, pp: int = 1) -> None:
        self.model, self.kv, self.layout = model, "bf16", ParallelLayout(pp=pp)

    def seconds(self, batch, length, prefill=None, drafts=0):
        return 0.01 * (batch > 0) + (prefill.prompts * prefill.tokens * 1e-4 if prefill else 0.0)


NETWORK = SimpleNamespace(send=lambda bytes_, nodes: bytes_ / (50e9 if nodes else 450e9))


def machine(
    models, load: PlanWorkload, batch: int = 64, tokens: int = 8192, pp: int = 1, prompts: bool = True
) -> ReplicaModel:
    return ReplicaModel(Clockwork(models.LLAMA31_8B, pp), load, batch, tokens, prompts)


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


def test_an_idle_queue_keeps_nobody_waiting():
    assert prefill_latency(0.1, 0.15, 0.0) == (0.15, 0.15, 0.15)


def test_a_prefill_worker(models):
    """1000 tokens take 0.1 s; their cache of 131,072 bytes each (in blocks of 32) goes over the network at 50 GB/s.
    Without a target a worker is kept 90 % busy."""
    load = PlanWorkload(1000, 200)
    replica = machine(models, load)
    sent = 1024 * 131_072 / 50e9
    assert transfer_seconds(replica, NETWORK) == pytest.approx(sent)
    worker = prefill_worker(replica, NETWORK)
    assert worker.service == pytest.approx(0.1)
    assert worker.unloaded == pytest.approx(0.1 + sent)
    assert worker.rate == pytest.approx(9.0)
    assert worker.latency == pytest.approx(worker.unloaded + 0.1 * 0.9 / (2 * 0.1))
    assert worker.gpus == 1
    staged = prefill_worker(machine(models, load, pp=2), NETWORK)
    assert staged.unloaded == pytest.approx(0.2 + sent / 2)
    assert staged.gpus == 2
    cached = prefill_worker(machine(models, replace(load, prefix_hit=0.5)), NETWORK)
    assert cached.service == pytest.approx(0.05)


@pytest.mark.parametrize("target", [0.15, 0.3, 0.6])
def test_a_prefill_worker_is_as_busy_as_its_target_allows(models, target):
    worker = prefill_worker(machine(models, PlanWorkload(1000, 200, ttft_p95=target)), NETWORK)
    assert worker.latency_p95 == pytest.approx(target, rel=1e-3)
    busier = prefill_latency(worker.service, worker.unloaded, worker.rate * 1.02)
    assert busier[1] > target


def test_a_target_that_only_an_idle_worker_keeps(models):
    unloaded = prefill_worker(machine(models, PlanWorkload(1000, 200)), NETWORK).unloaded
    assert prefill_worker(machine(models, PlanWorkload(1000, 200, ttft_p95=unloaded)), NETWORK) is not None
    assert prefill_worker(machine(models, PlanWorkload(1000, 200, ttft_p95=unloaded * 0.999)), NETWORK) is None


def test_a_decode_worker_reads_no_prompts(models):
    """64 sequences of 200 tokens, a token each 10 ms: 32 requests/s."""
    worker = decode_worker(machine(models, PlanWorkload(1000, 200)))
    assert worker.rate == pytest.approx(32)
    assert worker.latency == worker.latency_p95 == pytest.approx(0.01)
    assert (worker.service, worker.unloaded) == (0, 0)
    assert decode_worker(machine(models, PlanWorkload(1000, 200, tpot_p95=0.01))) is not None
    assert decode_worker(machine(models, PlanWorkload(1000, 200, tpot_p95=0.0099))) is None


def test_the_slower_side_sets_the_rate():
    pair = Disaggregated(PREFILL, DECODE, 2, 4)
    assert pair.gpus == 2 * 2 + 4 * 4
    assert pair.rate == 6.0
    assert Disaggregated(PREFILL, DECODE, 3, 4).rate == 8.0


def test_what_a_user_sees_of_a_set():
    point = Disaggregated(PREFILL, DECODE, 2, 4).point(PlanWorkload(1000, 200), 4.0)
    assert point.concurrency == pytest.approx(4 * 200 * 0.01)
    # two requests/s on each of two workers: 50 % busy
    assert point.ttft == pytest.approx(0.3 + 0.25 * 0.5 / (2 * 0.5))
    assert point.ttft_p95 == pytest.approx(0.3 + 0.25 / (2 * 0.5) * math.log(0.5 / 0.05))
    assert (point.tpot, point.tpot_p95, point.pause) == (0.01, 0.02, 0.02)
    assert point.prefill_share == pytest.approx(4 / 20)
    assert point.tokens_per_second == 800
    assert point.per_gpu == pytest.approx(40)
    assert point.per_user == pytest.approx(100)
    assert Disaggregated(PREFILL, DECODE, 2, 4).point(PlanWorkload(1000, 200), 99.0).ttft < 1


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


def test_a_batch_is_full_when_the_step_is(models):
    """A sequence of 200 tokens lets in a prompt of 1000 every 200 steps: 5 of its tokens a step, and its own."""
    assert machine(models, PlanWorkload(1000, 200), 4000, 600).full_batch == pytest.approx(100)
    assert machine(models, PlanWorkload(1000, 200), 64, 600).full_batch == 64
    assert machine(models, PlanWorkload(1000, 200), 4000, 600, prompts=False).full_batch == pytest.approx(600)
    assert machine(models, PlanWorkload(1000, 200, draft_tokens=3, acceptance=0.0), 4000, 600).full_batch == (
        pytest.approx(600 / 9)
    )
    assert machine(models, PlanWorkload(1000, 200), 4000, 1).full_batch == 1


def test_random_arrivals_leave_room_for_their_peaks(models):
    """The mean whose 95th percentile, mean + 1.645 x its root, is the batch; or 85 % of a step's tokens."""
    mean = machine(models, PlanWorkload(1000, 200), 64).steady_batch
    assert mean + 1.645 * math.sqrt(mean) == pytest.approx(64)
    assert machine(models, PlanWorkload(1000, 200), 4000, 600).steady_batch == pytest.approx(85)
    assert machine(models, PlanWorkload(1000, 200), 1).steady_batch == 1


def test_the_steady_state_of_clockwork(models):
    """40 sequences: each step of 10 ms lets in 0.2 prompts of 0.1 s, so a token takes 30 ms on average."""
    point = machine(models, PlanWorkload(1000, 200)).at(40, bursts=False)
    assert point.tpot == point.tpot_p95 == pytest.approx(0.03)
    assert point.rate == pytest.approx(40 / (200 * 0.03))
    assert point.tokens_per_second == pytest.approx(40 / 0.03)
    assert point.prefill_share == pytest.approx(2 / 3)
    assert point.gpus == 1
    # the longest pause: a step with a whole prompt
    assert point.pause == pytest.approx(0.11)


def test_drafts_and_stages_of_clockwork(models):
    """Two tokens a step without prompts; two stages take 10 ms each for half of the batch, one behind the other."""
    drafted = machine(models, PlanWorkload(1000, 200, draft_tokens=1, acceptance=0.999), prompts=False).at(
        40, bursts=False
    )
    assert drafted.tpot == pytest.approx(0.01 / 1.999)
    assert drafted.rate == pytest.approx(40 * 1.999 / (200 * 0.01))
    staged = machine(models, PlanWorkload(1000, 200), pp=2).at(40, bursts=False)
    assert staged.tpot == pytest.approx(2 * (0.01 + 0.1 * 0.1))
    assert staged.gpus == 2
    assert staged.pause == pytest.approx(2 * 0.11)


def test_a_pause_is_a_chunk_where_prompts_are_cut(models):
    """A step of 600 tokens has room for 560 beside 40 sequences."""
    assert machine(models, PlanWorkload(1000, 200), tokens=600).at(40).pause == pytest.approx(0.01 + 0.056)
    whole = PlanWorkload(1000, 200, chunked_prefill=False)
    assert machine(models, whole, tokens=600).at(40).pause == pytest.approx(0.11)
    drafted = PlanWorkload(1000, 200, draft_tokens=2, acceptance=0.0)
    assert machine(models, drafted, tokens=600).at(40).pause == pytest.approx(0.01 + 0.048)
    assert machine(models, PlanWorkload(1000, 200), prompts=False).at(40).pause == pytest.approx(0.01)


def test_a_point_per_gpu_and_user():
    point = OperatingPoint(10, 2.0, 0.1, 0.2, 0.02, 0.03, prefill_share=0.25, tokens_per_second=400, gpus=4)
    assert point.per_gpu == 100
    assert point.per_user == 50
    assert point.pause == 0
