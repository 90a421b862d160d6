"""Evaluate one layout on one kind of GPU.

A candidate is a layout that fits and meets the targets, with its replicas and its cost.
"""

import math
from dataclasses import dataclass

from llmops.build.plan.gpu_specs import GB, GpuSpec
from llmops.build.plan.memory import kv_sizes
from llmops.build.plan.memory.memory_budget import MemoryBudget, PlannedLimits, plan_memory
from llmops.build.plan.memory.parallel_layout import ParallelLayout, layout_problem
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.search.serving_cost import FleetCost, fleet_cost
from llmops.build.plan.speed.disaggregated import Disaggregated
from llmops.build.plan.speed.replica_model import OperatingPoint, ReplicaModel, highest_point
from llmops.build.plan.speed.step_time import MeasuredCorrection, StepModel
from llmops.build.plan.timing.operation_times import OperationTimes

#: Maximum number of sequences in a batch: TensorRT-LLM's default.
MAX_BATCH = 2048

#: Mean hours that a GPU runs between two interruptions: 16,384 H100 had 419 interruptions in 54 days
#: (The Llama 3 herd of models, 2024, table 5).
GPU_HOURS_BETWEEN_FAILURES = 50_000.0
#: Hours until a lost replica serves again: an assumption for a new node and the engine's start.
REPAIR_HOURS = 1.0


class LayoutRejected(Exception):
    """An error for a layout that cannot serve the request. The message is the reason, in one line.

    Attributes:
        memory: The memory budget, if the layout does not fit.
        missed: The best operating point, if its latencies miss the targets.
        needs: The number of GPUs for the requested rate, if the request allows fewer.
        wider: True if one replica needs more GPUs than the request allows.
        unbuildable: The error message of the build, if the build rejects the layout.
    """

    def __init__(
        self,
        reason: str,
        *,
        memory: MemoryBudget | None = None,
        missed: OperatingPoint | None = None,
        needs: int | None = None,
        wider: bool = False,
        unbuildable: str = "",
    ) -> None:
        super().__init__(reason)
        self.reason, self.memory, self.missed, self.needs = reason, memory, missed, needs
        self.wider, self.unbuildable = wider, unbuildable


@dataclass(frozen=True)
class Candidate:
    """A layout that can serve the request, with its speed and cost.

    `point` is the operating point of one replica (or of the whole disaggregated set) at the
    requested rate, and `best` at the highest rate that meets the targets. `capacity` is the rate of
    all replicas at `best`, in requests/s. `spares` is the number of replicas that the load does not
    need, and the availability target does. `paged` and `contiguous` are the numbers of sequences
    per replica that fit with and without paging. `kv_token` is the size of one token in the KV
    cache of a GPU, in bytes.
    """

    gpu: GpuSpec
    layout: ParallelLayout
    limits: PlannedLimits
    memory: MemoryBudget
    replicas: int
    gpus: int
    point: OperatingPoint
    best: OperatingPoint
    capacity: float
    cost: FleetCost
    paged: int
    contiguous: int
    kv_token: int
    workers: Disaggregated | None = None
    spares: int = 0

    @property
    def nodes(self) -> int:
        """Return the number of nodes that hold the GPUs."""
        return -(-self.gpus // self.gpu.per_node)

    @property
    def kind(self) -> str:
        """Return "disaggregated" or "aggregated"."""
        return "disaggregated" if self.workers else "aggregated"

    @property
    def name(self) -> str:
        """Return the layout as text, such as tp2 pp1."""
        if self.workers is None:
            return str(self.layout)
        pair = self.workers
        return f"{pair.prefill_count}x {pair.prefill.layout} prefill + {pair.decode_count}x {pair.decode.layout} decode"


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits in memory, with its limits and the model of one replica.

    `paged` and `contiguous` are the numbers of sequences per replica that fit with and without
    paging.
    """

    layout: ParallelLayout
    limits: PlannedLimits
    memory: MemoryBudget
    replica: ReplicaModel
    paged: int
    contiguous: int


def fit_layout(
    request: PlanRequest,
    gpu: GpuSpec,
    layout: ParallelLayout,
    times: OperationTimes,
    correction: MeasuredCorrection | None = None,
) -> FittingLayout:
    """Return the layout with the limits that fit its memory.

    Raises:
        LayoutRejected: TensorRT-LLM cannot run the layout, or the layout does not fit.
    """
    if layout.gpus > request.max_gpus:
        raise LayoutRejected(f"one replica needs {layout.gpus} GPUs, and {request.max_gpus} are given", wider=True)
    reason = layout_problem(request.model, request.precision, gpu, layout, request.kv)
    if reason:
        raise LayoutRejected(reason)
    batch, limits, memory = MAX_BATCH, PlannedLimits(1, 1, 1), None
    # A larger batch has larger logits, which leave less memory for the KV cache of the batch. Two
    # rounds settle the batch and the cache, and the third computes the memory for this batch.
    for _ in range(3):
        limits = PlannedLimits(batch, request.num_tokens, request.seq_len, request.kv_fraction)
        memory = plan_memory(request.model, request.precision, request.kv, layout, gpu, limits)
        fitting = kv_sizes.sequences_that_fit(
            memory.kv_cache, request.model, request.kv, layout, request.workload.length
        )
        if 1 <= fitting < batch:
            batch = fitting
    if memory is None or not memory.fits:
        raise LayoutRejected(_too_large(memory, gpu), memory=memory)
    paged = kv_sizes.sequences_that_fit(memory.kv_cache, request.model, request.kv, layout, request.workload.length)
    contiguous = kv_sizes.sequences_that_fit(memory.kv_cache, request.model, request.kv, layout, request.seq_len)
    if not contiguous:
        raise LayoutRejected(
            f"the cache of {memory.kv_cache / GB:.1f} GB does not hold one sequence of {request.seq_len} tokens"
        )
    steps = step_model(request, gpu, layout, times)
    steps.correction = correction
    replica = ReplicaModel(steps, request.workload, min(paged, MAX_BATCH), request.num_tokens)
    return FittingLayout(layout, limits, memory, replica, paged, contiguous)


def step_model(request: PlanRequest, gpu: GpuSpec, layout: ParallelLayout, times: OperationTimes) -> StepModel:
    """Return the model of one layout's engine steps. `times` gives the operation times."""
    nodes = layout.gpus > gpu.per_node
    return StepModel(request.model, request.precision, request.kv, layout, times, nodes)


def _too_large(memory: MemoryBudget | None, gpu: GpuSpec) -> str:
    if memory is None:
        return "does not fit"
    weights, total = memory.weight_bytes / GB, gpu.memory / GB
    return f"{memory.short / GB:.1f} GB short: weights take {weights:.1f} of {total:.1f} GB per GPU"


def meets_targets(request: PlanRequest, point: OperatingPoint) -> bool:
    """Return True if the operating point meets all latency targets of the request."""
    return all(getattr(point, name) <= limit for name, limit in request.workload.targets.items())


def evaluate_layout(request: PlanRequest, gpu: GpuSpec, fitted: FittingLayout) -> Candidate:
    """Return the candidate for a fleet of equal replicas of the layout.

    Raises:
        LayoutRejected: The layout misses a target or needs too many GPUs.
    """
    replica, layout = fitted.replica, fitted.layout
    best = highest_point(replica.at, replica.steady_batch, lambda point: meets_targets(request, point))
    if best is None:
        alone = replica.at(1.0)
        raise LayoutRejected(_missed(request, alone), missed=alone)
    qps = request.workload.qps
    needed = math.ceil(qps / best.rate - 1e-9) if qps else 1
    spares = spare_replicas(needed, layout.gpus, request.workload.availability)
    replicas = needed + spares
    gpus, rate = replicas * layout.gpus, qps or best.rate
    if gpus > request.max_gpus:
        each = f"{best.rate:.2f} each{f', {spares} spare' if spares else ''}"
        raise LayoutRejected(
            f"{rate:g} requests/s need {gpus} GPUs ({each}), and {request.max_gpus} are given", needs=gpus
        )
    point = at_rate(replica, rate / replicas, best) if qps or spares else best
    capacity = best.rate * replicas
    return Candidate(
        gpu=gpu,
        layout=layout,
        limits=fitted.limits,
        memory=fitted.memory,
        replicas=replicas,
        gpus=gpus,
        point=point,
        best=best,
        capacity=capacity,
        cost=fleet_cost(gpu.price, gpus, rate, capacity, point, request.workload, request.api),
        paged=fitted.paged,
        contiguous=fitted.contiguous,
        kv_token=kv_sizes.token_bytes(request.model, request.kv, layout),
        spares=spares,
    )


def spare_replicas(needed: int, gpus: int, availability: float | None) -> int:
    """Return the number of spare replicas that keeps `needed` replicas running.

    Args:
        needed: The number of replicas that serve the load.
        gpus: The number of GPUs of one replica.
        availability: The share of the time in which `needed` replicas must run, or None for no
            spares.
    """
    if availability is None:
        return 0
    down = min(gpus * REPAIR_HOURS / GPU_HOURS_BETWEEN_FAILURES, 0.5)
    for spares in range(needed + 1):
        count = needed + spares
        enough = sum(math.comb(count, lost) * down**lost * (1 - down) ** (count - lost) for lost in range(spares + 1))
        if enough >= availability:
            break
    return spares


def _missed(request: PlanRequest, alone: OperatingPoint) -> str:
    missed = {name: limit for name, limit in request.workload.targets.items() if getattr(alone, name) > limit}
    # The time per output token comes first: it depends on the layout and not on the queue.
    name, limit = max(missed.items(), key=lambda target: target[0].startswith("tpot"))
    label, digits = name.upper().replace("_P", " p"), 1 if name.startswith("tpot") else 0
    reached = f"{1e3 * getattr(alone, name):.{digits}f} ms"
    return f"{label} is {reached} even for one request; target {1e3 * limit:g} ms"


def at_rate(replica: ReplicaModel, rate: float, best: OperatingPoint) -> OperatingPoint:
    """Return the operating point at `rate` requests/s, which is at most the rate of `best`."""
    low, high = 0.0, best.concurrency
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if replica.at(middle).rate < rate else (low, middle)
    return replica.at(high)


def batch_curve(replica: ReplicaModel) -> tuple[OperatingPoint, ...]:
    """Return the operating points of 1, 2, 4, … sequences in flight, up to a full batch."""
    full = replica.full_batch
    batches = [2.0**step for step in range(int(math.log2(full)) + 1)]
    return tuple(replica.at(batch, bursts=False) for batch in dict.fromkeys([*batches, full]))
