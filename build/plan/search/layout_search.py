"""Search all layouts on all kinds of GPU.

Layouts that meet the targets are ranked by cost. Each other layout is listed with
the reason for its rejection.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from llmops.build.plan.gpu_specs import GPUS, GpuSpec
from llmops.build.plan.memory import kv_sizes
from llmops.build.plan.memory.parallel_layout import ParallelLayout, candidate_layouts
from llmops.build.plan.search.candidate import (
    Candidate,
    FittingLayout,
    LayoutRejected,
    batch_curve,
    evaluate_layout,
    fit_layout,
    step_model,
)
from llmops.build.plan.search.infeasible import TriedLayout, explain_infeasible
from llmops.build.plan.search.measured_correction import measured_correction
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.search.serving_cost import fleet_cost
from llmops.build.plan.speed.disaggregated import Disaggregated, decode_worker, match_workers, prefill_worker
from llmops.build.plan.speed.replica_model import OperatingPoint
from llmops.build.plan.speed.step_time import MeasuredCorrection
from llmops.build.plan.timing.operation_times import OperationTimes
from llmops.build.plan.timing.roofline import RooflineTimes
from llmops.errors import InputError


@dataclass(frozen=True)
class RejectedLayout:
    """A rejected layout on a kind of GPU, with the reason in one line."""

    gpu: str
    layout: str
    reason: str


@dataclass(frozen=True)
class BatchCurve:
    """The operating points of a layout that fits, from one sequence to a full batch.

    Points that miss the targets are included.
    """

    gpu: str
    layout: str
    points: tuple[OperatingPoint, ...]


@dataclass(frozen=True)
class PlanResult:
    """The result of a search.

    `candidates` can be built and deployed, and are in ascending order of cost. `disaggregated`
    holds candidates with separate prefill and decode workers, which llmops shows and does not
    deploy. `timing` maps the name of each GPU to the source of its operation times.
    """

    request: PlanRequest
    candidates: tuple[Candidate, ...]
    rejections: tuple[RejectedLayout, ...]
    timing: dict[str, str] = field(default_factory=dict)
    curves: tuple[BatchCurve, ...] = ()
    disaggregated: tuple[Candidate, ...] = ()

    @property
    def best(self) -> Candidate:
        """Return the cheapest candidate."""
        return self.candidates[0]

    @property
    def cheaper_disaggregated(self) -> Candidate | None:
        """Return the disaggregated candidate that costs less than the best one, or None."""
        rank = _rank(self.request)
        return next((candidate for candidate in self.disaggregated if rank(candidate)[0] < rank(self.best)[0]), None)


@dataclass
class _SearchResults:
    """The results that a search collects: candidates, curves and rejected layouts."""

    candidates: list[Candidate] = field(default_factory=list)
    disaggregated: list[Candidate] = field(default_factory=list)
    rejections: list[RejectedLayout] = field(default_factory=list)
    tried: list[TriedLayout] = field(default_factory=list)
    curves: list[BatchCurve] = field(default_factory=list)

    def reject(self, gpu: GpuSpec, layout: ParallelLayout, rejection: LayoutRejected) -> None:
        self.rejections.append(RejectedLayout(gpu.name, str(layout), rejection.reason))
        self.tried.append(TriedLayout(gpu, layout, rejection))


def search_layouts(
    request: PlanRequest,
    times_of: Callable[[GpuSpec], OperationTimes],
    progress: Callable[[str], None] = lambda _: None,
    refusal: Callable[[Candidate], str | None] = lambda _: None,
) -> PlanResult:
    """Search every layout on every GPU of the request.

    Args:
        request: The request.
        times_of: A function that returns the operation times of a GPU.
        progress: A function that receives each layout before it is evaluated.
        refusal: A function that returns the reason for which the build rejects a candidate, or
            None.

    Raises:
        InputError: No layout can serve the request.
    """
    found, timing = _SearchResults(), {}
    for gpu in request.gpus:
        times = times_of(gpu)
        corrected = _correction(request, gpu, times)
        fitted = []
        for layout in candidate_layouts(request.model, request.tp, request.pp, request.expert_split):
            progress(f"{gpu.name} {layout}")
            try:
                fitted.append(fit_layout(request, gpu, layout, times, corrected))
                found.curves.append(BatchCurve(gpu.name, str(layout), batch_curve(fitted[-1].replica)))
                candidate = evaluate_layout(request, gpu, fitted[-1])
                reason = refusal(candidate)
                if reason:
                    found.curves.pop()
                    raise LayoutRejected(f"cannot be built: {reason}", unbuildable=reason)
                found.candidates.append(candidate)
            except LayoutRejected as rejection:
                found.reject(gpu, layout, rejection)
        if request.disaggregated:
            progress(f"{gpu.name} disaggregated")
            found.disaggregated += _disaggregated(request, gpu, fitted, times)
        timing[gpu.name] = describe_times(times) + (f"; {corrected.label}" if corrected else "")
    if not found.candidates:
        only = (
            min(found.disaggregated, key=_rank(request))
            if found.disaggregated and request.workload.has_targets
            else None
        )
        raise InputError(
            explain_infeasible(request, found.tried, only, lambda: _alternative(request, times_of, refusal))
        )
    ranked, disaggregated = (
        tuple(sorted(some, key=_rank(request))) for some in (found.candidates, found.disaggregated)
    )
    return PlanResult(
        request=request,
        candidates=ranked,
        rejections=tuple(found.rejections),
        timing=timing,
        curves=tuple(found.curves),
        disaggregated=disaggregated,
    )


def _alternative(
    request: PlanRequest, times_of: Callable[[GpuSpec], OperationTimes], refusal: Callable[[Candidate], str | None]
) -> Candidate | None:
    """Return the cheapest deployment that would serve the request, or None.

    Deployments on up to four times as many GPUs as requested are tried first, then deployments on
    kinds of GPUs with more memory.
    """
    largest = max(gpu.memory for gpu in request.gpus)
    larger = [gpu for gpu in GPUS.values() if gpu.memory > largest]
    return _cheapest(request, request.gpus, 4 * request.max_gpus, times_of, refusal) or _cheapest(
        request, larger, request.max_gpus, times_of, refusal
    )


def _cheapest(
    request: PlanRequest,
    gpus: Sequence[GpuSpec],
    count: int,
    times_of: Callable[[GpuSpec], OperationTimes],
    refusal: Callable[[Candidate], str | None],
) -> Candidate | None:
    found = []
    for gpu in gpus:
        other_request = replace(request, gpus=(gpu,), max_gpus=count, measured=None)
        # The search itself reports problems with the operation times of the requested GPUs.
        times = times_of(gpu) if gpu in request.gpus else RooflineTimes(gpu)
        for layout in candidate_layouts(request.model, request.tp, request.pp, request.expert_split):
            with suppress(LayoutRejected):
                candidate = evaluate_layout(other_request, gpu, fit_layout(other_request, gpu, layout, times))
                if not refusal(candidate):
                    found.append(candidate)
    return min(found, key=_rank(request), default=None)


def _correction(request: PlanRequest, gpu: GpuSpec, times: OperationTimes) -> MeasuredCorrection | None:
    measured = request.measured
    if measured is None or (measured.gpu != gpu.name and len(request.gpus) > 1):
        return None
    return measured_correction(measured, request, lambda layout: step_model(request, gpu, layout, times))


def describe_times(times: OperationTimes) -> str:
    """Return the source of the times as text, with the operations taken from the roofline."""
    missing = sorted(getattr(times, "missing", ()))
    return times.label + (f"; roofline for {', '.join(missing)}" if missing else "")


def _rank(request: PlanRequest) -> Callable[[Candidate], tuple[float, int, float]]:
    """Return the sort key: $/h for a given rate, otherwise $ per request.

    Candidates of the same cost are sorted by fewer GPUs, then by more capacity.
    """

    def key(candidate: Candidate) -> tuple[float, int, float]:
        money = candidate.cost.hourly if request.workload.qps else candidate.cost.request
        return (round(money, 9), candidate.gpus, -candidate.capacity)

    return key


def _disaggregated(
    request: PlanRequest, gpu: GpuSpec, fitted: list[FittingLayout], times: OperationTimes
) -> list[Candidate]:
    """Return the cheapest pair of prefill and decode workers, or no candidates if no pair fits.

    The cheapest pair needs the fewest GPUs for the requested rate, or per request/s without a rate.
    """
    prefills = [worker for fitting in fitted if (worker := prefill_worker(fitting.replica, times))]
    decodes = [(worker, fitting) for fitting in fitted if (worker := decode_worker(fitting.replica))]
    qps = request.workload.qps
    pairs = [
        (pair, fitting)
        for prefill in prefills
        for decode, fitting in decodes
        if (pair := match_workers(prefill, decode, qps, request.max_gpus)) and _keeps_joint_targets(request, pair)
    ]
    if not pairs:
        return []
    pair, fitting = min(
        pairs, key=lambda found: (found[0].gpus if qps else found[0].gpus / found[0].rate, found[0].gpus)
    )
    return [_candidate(request, gpu, fitting, pair)]


def _keeps_joint_targets(request: PlanRequest, pair: Disaggregated) -> bool:
    """Return True if a pair meets the end-to-end targets and the target of the median TTFT.

    These targets depend on both workers, so no worker alone can be checked against them.
    """
    load = request.workload
    point = pair.point(load, load.qps or pair.rate)
    targets = {name: limit for name, limit in load.targets.items() if name.startswith("e2e") or name == "ttft_p50"}
    return all(getattr(point, name) <= limit for name, limit in targets.items())


def _candidate(request: PlanRequest, gpu: GpuSpec, fitting: FittingLayout, pair: Disaggregated) -> Candidate:
    load = request.workload
    rate = load.qps or pair.rate
    point, best = pair.point(load, rate), pair.point(load, pair.rate)
    return Candidate(
        gpu=gpu,
        layout=fitting.layout,
        limits=fitting.limits,
        memory=fitting.memory,
        replicas=1,
        gpus=pair.gpus,
        point=point,
        best=best,
        capacity=pair.rate,
        cost=fleet_cost(gpu.price, pair.gpus, rate, pair.rate, point, load, request.api),
        paged=fitting.paged,
        contiguous=fitting.contiguous,
        kv_token=kv_sizes.token_bytes(request.model, request.kv, fitting.layout),
        workers=pair,
    )
