"""Model disaggregated serving: separate workers for prefill and decode, which send the KV cache."""

import math
from dataclasses import dataclass

from llmops.build.plan.memory import kv_sizes
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.speed.replica_model import OperatingPoint, ReplicaModel, highest_point
from llmops.build.plan.speed.step_time import Prefill
from llmops.build.plan.speed.workload import PlanWorkload
from llmops.build.plan.timing.operation_times import OperationTimes

#: Maximum number of prefill workers, and of decode workers, in a set without a required rate.
MAX_RATIO = 8
#: Share of the time in which a prefill worker is busy, if no latency target sets the share.
BUSY_WITHOUT_TARGET = 0.9


@dataclass(frozen=True)
class WorkerPool:
    """One worker, for prefill or decode, at the highest rate that meets the worker's target.

    `rate` is in requests/s. Latencies are in seconds: the mean, and the 95th and 99th percentile. A
    prefill worker is busy for `service` seconds per request, and answers in `unloaded` seconds when
    no other request waits.
    """

    layout: ParallelLayout
    rate: float
    latency: float
    latency_p95: float
    gpus: int
    service: float = 0.0
    unloaded: float = 0.0
    latency_p99: float = 0.0


def prefill_worker(replica: ReplicaModel, times: OperationTimes) -> WorkerPool | None:
    """Return a prefill worker, or None if even an idle worker misses the TTFT target.

    Prompts arrive at random and are read one at a time (M/D/1). The transfer of the KV cache to the
    decode worker is part of the TTFT, because a user sees no token before the KV cache has arrived.
    """
    load, steps = replica.workload, replica.steps
    layout = steps.layout
    stage = steps.seconds(0, 0, Prefill(1, load.new_tokens, load.isl - load.new_tokens))
    total = layout.pp * stage + transfer_seconds(replica, times)
    targets = [(limit, tail) for limit, tail in ((load.ttft_p95, 0.05), (load.ttft_p99, 0.01)) if limit is not None]
    if any(total > limit for limit, _ in targets):
        return None
    rate = min((_busiest(stage, total, limit, tail) for limit, tail in targets), default=BUSY_WITHOUT_TARGET) / stage
    mean, p95, p99 = prefill_latency(stage, total, rate)
    return WorkerPool(layout, rate, mean, p95, layout.gpus, service=stage, unloaded=total, latency_p99=p99)


def prefill_latency(service: float, unloaded: float, rate: float) -> tuple[float, float, float]:
    """Return mean, 95th and 99th percentile of the TTFT in seconds, at `rate` requests/s.

    The worker is an M/D/1 queue: a request keeps the worker busy for `service` seconds, and without
    waiting has a TTFT of `unloaded` seconds. The percentiles are computed from the queue's
    exponential tail.
    """
    busy = rate * service
    wait = busy * service / (2 * (1 - busy))
    high, highest = (unloaded + max(wait, _long_wait(busy, service, tail)) for tail in (0.05, 0.01))
    return unloaded + wait, high, highest


def transfer_seconds(replica: ReplicaModel, times: OperationTimes) -> float:
    """Return the seconds to send a prompt's KV cache and states to a decode worker.

    Each rank of the prefill worker sends its own part at the same time.
    """
    steps, load = replica.steps, replica.workload
    size = kv_sizes.sequence_bytes(steps.model, steps.kv, steps.layout, load.isl)
    return times.send(size + kv_sizes.state_bytes(steps.model, steps.layout), nodes=True)


def _long_wait(busy: float, service: float, tail: float) -> float:
    """Return the wait in seconds that a share `tail` of the requests exceeds.

    The worker is busy for the share `busy` of the time, and for `service` seconds per request.
    """
    return service / (2 * (1 - busy)) * math.log(busy / tail) if busy > tail else 0.0


def _busiest(service: float, total: float, target: float, tail: float) -> float:
    """Return the highest load at which at most a share `tail` of the requests misses the target.

    The load is the share of the time in which the worker is busy, from 0.01 to 0.95.

    Args:
        service: The seconds for which a request keeps the worker busy.
        total: The latency in seconds of a request that need not wait.
        target: The maximum latency in seconds.
        tail: The share of the requests that may exceed `target`.
    """
    low, high = 0.01, 0.95
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if total + _long_wait(middle, service, tail) <= target else (low, middle)
    return low


def decode_worker(replica: ReplicaModel) -> WorkerPool | None:
    """Return a decode worker, or None if it misses the TPOT target.

    Sequences arrive with their KV cache, so the worker reads no prompts.
    """
    load = replica.workload
    alone = ReplicaModel(replica.steps, load, replica.max_batch, replica.max_num_tokens, prompts=False)
    targets = {name: limit for name, limit in load.targets.items() if name.startswith("tpot")}
    point = highest_point(
        alone.at, alone.full_batch, lambda at: all(getattr(at, name) <= limit for name, limit in targets.items())
    )
    if point is None:
        return None
    layout, p99 = replica.steps.layout, point.tpot_p99
    return WorkerPool(layout, point.rate, point.tpot, point.tpot_p95, point.gpus, latency_p99=p99)


@dataclass(frozen=True)
class Disaggregated:
    """A set of prefill and decode workers that serve one model.

    `prefill_count` workers feed `decode_count` workers. The slower kind limits the rate.
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
        """Return the highest rate of the set, in requests/s."""
        return min(self.prefill_count * self.prefill.rate, self.decode_count * self.decode.rate)

    def point(self, load: PlanWorkload, rate: float) -> OperatingPoint:
        """Return the operating point of the whole set at `rate` requests/s.

        The decode workers are assumed to be at their highest rate.
        """
        each = min(rate / self.prefill_count, self.prefill.rate)
        ttft, ttft_p95, ttft_p99 = prefill_latency(self.prefill.service, self.prefill.unloaded, each)
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
            ttft_p99=ttft_p99,
            tpot_p99=self.decode.latency_p99,
        )


def match_workers(prefill: WorkerPool, decode: WorkerPool, qps: float | None, max_gpus: int) -> Disaggregated | None:
    """Return the best numbers of prefill and decode workers, or None if no set fits.

    For the required rate `qps` in requests/s, each kind gets as many workers as the rate needs.
    Without a required rate, the set with the most requests/s per GPU is the best. A set may have at
    most `max_gpus` GPUs.
    """
    if qps is not None:
        pair = Disaggregated(prefill, decode, math.ceil(qps / prefill.rate), math.ceil(qps / decode.rate))
        return pair if pair.gpus <= max_gpus else None
    pairs = [Disaggregated(prefill, decode, p, d) for p in range(1, MAX_RATIO + 1) for d in range(1, MAX_RATIO + 1)]
    fitting = [pair for pair in pairs if pair.gpus <= max_gpus]
    return max(fitting, key=lambda pair: (pair.rate / pair.gpus, -pair.gpus), default=None)
