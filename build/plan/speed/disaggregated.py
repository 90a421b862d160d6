"""Disaggregated serving: prefill and decode on separate workers, between which the KV cache moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmops.build.plan.memory import kv_sizes
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.speed.replica_model import OperatingPoint, ReplicaModel, highest_point
from llmops.build.plan.speed.step_time import Prefill
from llmops.build.plan.speed.workload import PlanWorkload
from llmops.build.plan.timing.operation_times import OperationTimes

#: Largest number of workers of each kind in a set without a required rate.
MAX_RATIO = 8


@dataclass(frozen=True)
class WorkerPool:
    """One worker of a kind at the highest rate (requests/s) that keeps its target.

    `latency` and `latency_p95` are in seconds. A prefill worker is busy for `service` seconds per
    request and answers in `unloaded` seconds when no request waits.
    """

    layout: ParallelLayout
    rate: float
    latency: float
    latency_p95: float
    gpus: int
    service: float = 0.0
    unloaded: float = 0.0


def prefill_worker(replica: ReplicaModel, times: OperationTimes) -> WorkerPool | None:
    """Return a prefill worker, or None if even an idle one misses the TTFT target.

    Prompts arrive at random and are read one at a time (M/D/1). The transfer of the KV cache to the
    decoder counts to the TTFT, because a user sees no token before it has arrived.
    """
    load, steps = replica.workload, replica.steps
    layout = steps.layout
    stage = steps.seconds(0, 0, Prefill(1, load.new_tokens, load.isl - load.new_tokens))
    total = layout.pp * stage + transfer_seconds(replica, times)
    if load.ttft_p95 is not None and total > load.ttft_p95:
        return None
    rate = _busiest(stage, total, load.ttft_p95) / stage
    mean, p95 = prefill_latency(stage, total, rate)
    return WorkerPool(layout, rate, mean, p95, layout.gpus, service=stage, unloaded=total)


def prefill_latency(service: float, unloaded: float, rate: float) -> tuple[float, float]:
    """Return mean and 95th percentile of an M/D/1 queue at `rate` requests/s.

    The percentile comes from the exponential tail.
    """
    busy = rate * service
    wait = busy * service / (2 * (1 - busy))
    return unloaded + wait, unloaded + max(wait, _wait_p95(busy, service))


def transfer_seconds(replica: ReplicaModel, times: OperationTimes) -> float:
    """Return the seconds to send a prompt's KV cache from rank to rank.

    Each rank sends its own part.
    """
    steps, load = replica.steps, replica.workload
    return times.send(kv_sizes.sequence_bytes(steps.model, steps.kv, steps.layout, load.isl), nodes=True)


def _wait_p95(busy: float, service: float) -> float:
    """Return the 95th percentile of the wait in seconds."""
    return service / (2 * (1 - busy)) * math.log(busy / 0.05) if busy > 0.05 else 0.0


def _busiest(service: float, total: float, target: float | None) -> float:
    """Return the highest load whose waits keep the target, 0.9 where there is none."""
    if target is None:
        return 0.9
    low, high = 0.01, 0.95
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if total + _wait_p95(middle, service) <= target else (low, middle)
    return low


def decode_worker(replica: ReplicaModel) -> WorkerPool | None:
    """Return a decode worker, or None if it misses the TPOT target.

    Sequences arrive with their KV cache.
    """
    load = replica.workload
    alone = ReplicaModel(replica.steps, load, replica.max_batch, replica.max_num_tokens, prompts=False)
    point = highest_point(alone.at, alone.full_batch, lambda at: load.tpot_p95 is None or at.tpot_p95 <= load.tpot_p95)
    if point is None:
        return None
    return WorkerPool(replica.steps.layout, point.rate, point.tpot, point.tpot_p95, point.gpus)


@dataclass(frozen=True)
class Disaggregated:
    """A set of workers.

    `prefill_count` workers feed `decode_count` workers; the slower side sets the rate.
    """

    prefill: WorkerPool
    decode: WorkerPool
    prefill_count: int
    decode_count: int

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the set."""
        return self.prefill_count * self.prefill.gpus + self.decode_count * self.decode.gpus

    @property
    def rate(self) -> float:
        """Return the highest rate in requests/s."""
        return min(self.prefill_count * self.prefill.rate, self.decode_count * self.decode.rate)

    def point(self, load: PlanWorkload, rate: float) -> OperatingPoint:
        """Return what users see when the whole set serves `rate` requests/s.

        Decoding is assumed to be at its limit.
        """
        each = min(rate / self.prefill_count, self.prefill.rate)
        ttft, ttft_p95 = prefill_latency(self.prefill.service, self.prefill.unloaded, each)
        return OperatingPoint(
            concurrency=rate * load.osl * self.decode.latency,
            rate=rate,
            ttft=ttft,
            ttft_p95=ttft_p95,
            tpot=self.decode.latency,
            tpot_p95=self.decode.latency_p95,
            prefill_share=self.prefill_count * self.prefill.gpus / self.gpus,
            tokens_per_second=rate * load.osl,
            gpus=self.gpus,
            pause=self.decode.latency_p95,
        )


def match_workers(prefill: WorkerPool, decode: WorkerPool, qps: float | None, max_gpus: int) -> Disaggregated | None:
    """Return the best ratio of workers, or None if no set fits.

    For a rate, each side gets as many workers as the rate takes; otherwise the set with the most
    requests/s per GPU wins.
    """
    if qps is not None:
        pair = Disaggregated(prefill, decode, math.ceil(qps / prefill.rate), math.ceil(qps / decode.rate))
        return pair if pair.gpus <= max_gpus else None
    pairs = [Disaggregated(prefill, decode, p, d) for p in range(1, MAX_RATIO + 1) for d in range(1, MAX_RATIO + 1)]
    fitting = [pair for pair in pairs if pair.gpus <= max_gpus]
    return max(fitting, key=lambda pair: (pair.rate / pair.gpus, -pair.gpus), default=None)
