"""Convert a plan to plain data: the output of --json, and the BuildPlan of a layout."""

import math
from dataclasses import asdict
from typing import Any

from llmops.build.plan.build_plan import BuildPlan
from llmops.build.plan.memory.memory_budget import MemoryBudget
from llmops.build.plan.search.candidate import Candidate
from llmops.build.plan.search.layout_search import PlanResult
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.speed.replica_model import Z95, OperatingPoint

FORMAT = 1


def build_plan(plan: PlanResult, candidate: Candidate | None = None) -> BuildPlan:
    """Return the engine to build for `candidate`, or for the best candidate of the plan.

    A disaggregated candidate gives the decode worker's engine, with the prefill worker's layout
    under `predicted`.
    """
    chosen = candidate or plan.best
    return engine_plan(plan.request, chosen, _predicted(chosen, plan))


def engine_plan(request: PlanRequest, chosen: Candidate, predicted: dict[str, Any] | None = None) -> BuildPlan:
    """Return the engine to build for one candidate."""
    return BuildPlan(
        model=request.name,
        architecture=request.model.hf_class,
        hidden_size=request.model.hidden_size,
        num_layers=request.model.num_layers,
        target=request.target,  # type: ignore[arg-type]
        gpu=chosen.gpu.name,
        quantisation=request.precision.name,
        kv_cache_dtype=request.kv,
        group_size=128 if request.precision.group == 128 else None,
        tp_size=chosen.layout.tp,
        pp_size=chosen.layout.pp,
        ep_size=chosen.layout.ep,
        max_batch_size=batch_limit(chosen),
        max_num_tokens=chosen.limits.max_num_tokens,
        max_seq_len=chosen.limits.max_seq_len,
        kv_cache_fraction=chosen.limits.kv_fraction,
        chunked_prefill=request.workload.chunked_prefill,
        replicas=chosen.workers.decode_count if chosen.workers else chosen.replicas,
        predicted=predicted or {},
    )


def batch_limit(candidate: Candidate) -> int:
    """Return the maximum batch size of the engine to build for `candidate`.

    The batch size leaves room for random peaks at the highest rate that meets the targets. The
    batch size is a multiple of 8, unless fewer sequences fit.
    """
    replicas = candidate.workers.decode_count if candidate.workers else 1
    mean = candidate.best.concurrency / replicas
    peak = math.ceil((mean + Z95 * math.sqrt(mean)) / 8) * 8
    return max(1, min(peak, candidate.paged, candidate.limits.max_batch_size))


def _predicted(candidate: Candidate, plan: PlanResult) -> dict[str, Any]:
    """Return the planner's estimates for a candidate as data.

    `single` is the operating point for one request at a time. All operating points assume prompts
    of `isl` tokens and answers of `osl` tokens.
    """
    load = plan.request.workload
    data = {
        "timing": plan.timing[candidate.gpu.name],
        "kind": candidate.kind,
        "isl": load.isl,
        "osl": load.osl,
        "weight_bytes_per_gpu": candidate.memory.weight_bytes,
        "kv_cache_bytes_per_gpu": candidate.memory.kv_cache,
        "kv_bytes_per_token": candidate.kv_token,
        "single": _single(candidate, plan),
        "point": point_data(candidate.point),
        "best": point_data(candidate.best),
    }
    if candidate.workers:
        data["prefill_layout"] = asdict(candidate.workers.prefill.layout)
        data["prefill_workers"] = candidate.workers.prefill_count
    return data


def _single(candidate: Candidate, plan: PlanResult) -> dict[str, float] | None:
    points = [
        point
        for curve in plan.curves
        if (curve.gpu, curve.layout) == (candidate.gpu.name, candidate.name)
        for point in curve.points
    ]
    return point_data(min(points, key=lambda point: point.concurrency)) if points else None


def point_data(point: OperatingPoint) -> dict[str, float]:
    """Return an operating point as data: requests/s, latencies in seconds, tokens/s."""
    return {**asdict(point), "per_gpu": point.per_gpu, "per_user": point.per_user}


def memory_data(memory: MemoryBudget) -> dict[str, Any]:
    """Return the parts of the fullest GPU's memory, in bytes."""
    return {**asdict(memory), "weight_bytes": memory.weight_bytes}


#: Families whose planned throughput agrees with NVIDIA's published throughput, within the planner's
#: stated error.
_VALIDATED_FAMILIES = ("llama", "mistral", "mixtral", "gpt_oss")


def accuracy_warning(plan: PlanResult) -> str | None:
    """Return warnings about the ranking and the speeds of a plan, as text, or None."""
    return " ".join(filter(None, (_targets_warning(plan), _speed_warning(plan)))) or None


def _targets_warning(plan: PlanResult) -> str | None:
    load = plan.request.workload
    if load.has_targets:
        return None
    return (
        "No latency targets were given: the ranking goes by cost alone, which favours full batches and slow answers. "
        "If people wait for answers, give --ttft-p95 and --tpot-p95."
    )


def _speed_warning(plan: PlanResult) -> str | None:
    family = plan.request.model.family
    if family in _VALIDATED_FAMILIES:
        return None
    return f"The planned speed of {family} models was not checked against published measurements."


def plan_data(plan: PlanResult) -> dict[str, Any]:
    """Return the whole plan as data, in bytes, seconds, requests/s and dollars."""
    request = plan.request
    return {
        "format": FORMAT,
        "model": {"name": request.name, **asdict(request.model)},
        "quantisation": request.precision.name,
        "kv_cache_dtype": request.kv,
        "workload": asdict(request.workload),
        "timing": plan.timing,
        "caution": accuracy_warning(plan),
        "plan": build_plan(plan).to_dict(),
        "candidates": [candidate_data(candidate) for candidate in plan.candidates],
        "disaggregated": [candidate_data(candidate) for candidate in plan.disaggregated],
        "curves": [
            {"gpu": curve.gpu, "layout": curve.layout, "points": [point_data(point) for point in curve.points]}
            for curve in plan.curves
        ],
        "rejected": [asdict(rejection) for rejection in plan.rejections],
    }


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as data: a row of the ranking with all figures."""
    data: dict[str, Any] = {
        "name": candidate.name,
        "kind": candidate.kind,
        "gpu": candidate.gpu.name,
        "layout": asdict(candidate.layout),
        "replicas": candidate.replicas,
        "gpus": candidate.gpus,
        "nodes": candidate.nodes,
        "capacity_requests_per_second": candidate.capacity,
        "point": point_data(candidate.point),
        "best": point_data(candidate.best),
        "cost": asdict(candidate.cost),
        "memory": memory_data(candidate.memory),
        "kv_bytes_per_token": candidate.kv_token,
        "sequences": {"paged": candidate.paged, "contiguous": candidate.contiguous},
        "limits": {**asdict(candidate.limits), "max_batch_size": batch_limit(candidate)},
    }
    if candidate.workers:
        pair = candidate.workers
        data["workers"] = {
            "prefill": {"count": pair.prefill_count, **asdict(pair.prefill)},
            "decode": {"count": pair.decode_count, **asdict(pair.decode)},
        }
    return data
