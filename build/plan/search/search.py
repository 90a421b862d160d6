"""All layouts on all kinds of GPU: those that hold the targets ranked by cost, the others with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from llmops.build.plan.gpus import GPUS, Gpu
from llmops.build.plan.memory import kv
from llmops.build.plan.memory.layout import Layout, candidates
from llmops.build.plan.search.candidate import Candidate, Fitted, Refused, curve, evaluate, fit, step_model
from llmops.build.plan.search.correction import Correction, correction
from llmops.build.plan.search.cost import fleet_cost
from llmops.build.plan.search.impossible import Tried, explain
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.speed.disaggregated import Disaggregated, decode_worker, match, prefill_worker
from llmops.build.plan.speed.serving import Point
from llmops.build.plan.timing.base import OpTimes
from llmops.build.plan.timing.roofline import Roofline
from llmops.errors import InputError


@dataclass(frozen=True)
class Rejection:
    """A layout that is out, and why, in one line."""

    gpu: str
    layout: str
    reason: str


@dataclass(frozen=True)
class Curve:
    """What a layout that fits gives from one sequence to a full batch, whether it holds the targets or not."""

    gpu: str
    layout: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Plan:
    """Everything the reports show. `candidates`: what can be built and deployed, by cost, the cheapest first; `apart`:
    prefill and decode on separate workers, which is only shown; `timing`: each GPU's source of times."""

    request: PlanRequest
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    timing: dict[str, str] = field(default_factory=dict)
    curves: tuple[Curve, ...] = ()
    apart: tuple[Candidate, ...] = ()

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def cheaper_apart(self) -> Candidate | None:
        """Separate workers that would cost less than the best."""
        rank = _rank(self.request)
        return next((one for one in self.apart if rank(one)[0] < rank(self.best)[0]), None)


@dataclass
class _Findings:
    candidates: list[Candidate] = field(default_factory=list)
    apart: list[Candidate] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)

    def refuse(self, gpu: Gpu, layout: Layout, refused: Refused) -> None:
        self.rejections.append(Rejection(gpu.name, str(layout), refused.reason))
        self.tried.append(Tried(gpu, layout, refused))


def search(
    request: PlanRequest,
    times_of: Callable[[Gpu], OpTimes],
    progress: Callable[[str], None] = lambda _: None,
    refusal: Callable[[Candidate], str | None] = lambda _: None,
) -> Plan:
    """Look at every layout on every GPU of the request. `refusal`: why a candidate cannot be built, or None. Raises
    InputError when none can serve it."""
    found, timing = _Findings(), {}
    for gpu in request.gpus:
        times = times_of(gpu)
        corrected = _correction(request, gpu, times)
        fitted = []
        for layout in candidates(request.model, request.tp, request.pp, request.expert_split):
            progress(f"{gpu.name} {layout}")
            try:
                fitted.append(fit(request, gpu, layout, times, corrected))
                found.curves.append(Curve(gpu.name, str(layout), curve(fitted[-1].replica)))
                candidate = evaluate(request, gpu, fitted[-1])
                reason = refusal(candidate)
                if reason:
                    found.curves.pop()
                    raise Refused(f"cannot be built: {reason}", unbuildable=reason)
                found.candidates.append(candidate)
            except Refused as refused:
                found.refuse(gpu, layout, refused)
        if request.disaggregated:
            progress(f"{gpu.name} disaggregated")
            found.apart += _disaggregated(request, gpu, fitted, times)
        timing[gpu.name] = describe(times) + (f"; {corrected.label}" if corrected else "")
    if not found.candidates:
        only = min(found.apart, key=_rank(request)) if found.apart and request.workload.has_targets else None
        raise InputError(explain(request, found.tried, only, lambda: _alternative(request, times_of, refusal)))
    ranked, apart = (tuple(sorted(some, key=_rank(request))) for some in (found.candidates, found.apart))
    return Plan(request, ranked, tuple(found.rejections), timing, tuple(found.curves), apart)


def _alternative(
    request: PlanRequest, times_of: Callable[[Gpu], OpTimes], refusal: Callable[[Candidate], str | None]
) -> Candidate | None:
    """Return the cheapest deployment on up to four times as many GPUs, or else on a kind with more memory."""
    largest = max(gpu.memory for gpu in request.gpus)
    larger = [gpu for gpu in GPUS.values() if gpu.memory > largest]
    return _cheapest(request, request.gpus, 4 * request.max_gpus, times_of, refusal) or _cheapest(
        request, larger, request.max_gpus, times_of, refusal
    )


def _cheapest(
    request: PlanRequest,
    gpus: Sequence[Gpu],
    count: int,
    times_of: Callable[[Gpu], OpTimes],
    refusal: Callable[[Candidate], str | None],
) -> Candidate | None:
    found = []
    for gpu in gpus:
        asked = replace(request, gpus=(gpu,), max_gpus=count, measured=None)
        # the search itself says what is wrong with the times of the GPUs that were asked for
        times = times_of(gpu) if gpu in request.gpus else Roofline(gpu)
        for layout in candidates(request.model, request.tp, request.pp, request.expert_split):
            with suppress(Refused):
                candidate = evaluate(asked, gpu, fit(asked, gpu, layout, times))
                if not refusal(candidate):
                    found.append(candidate)
    return min(found, key=_rank(request), default=None)


def _correction(request: PlanRequest, gpu: Gpu, times: OpTimes) -> Correction | None:
    measured = request.measured
    if measured is None or (measured.gpu != gpu.name and len(request.gpus) > 1):
        return None
    return correction(measured, request, lambda layout: step_model(request, gpu, layout, times))


def describe(times: OpTimes) -> str:
    """Where the times come from, with what fell back to the roofline."""
    missing = sorted(getattr(times, "missing", ()))
    return times.label + (f"; roofline for {', '.join(missing)}" if missing else "")


def _rank(request: PlanRequest) -> Callable[[Candidate], tuple[float, int, float]]:
    """By $/h for a given rate, otherwise by $ per request; ties go to fewer GPUs, then to more capacity."""

    def key(candidate: Candidate) -> tuple[float, int, float]:
        money = candidate.cost.hourly if request.workload.qps else candidate.cost.request
        return (round(money, 9), candidate.gpus, -candidate.capacity)

    return key


def _disaggregated(request: PlanRequest, gpu: Gpu, fitted: list[Fitted], times: OpTimes) -> list[Candidate]:
    """The cheapest pairing of a prefill worker with a decode worker: fewest GPUs for a rate, otherwise fewest per
    request/s."""
    prefills = [worker for one in fitted if (worker := prefill_worker(one.replica, times))]
    decodes = [(worker, one) for one in fitted if (worker := decode_worker(one.replica))]
    qps = request.workload.qps
    pairs = [
        (pair, one)
        for prefill in prefills
        for decode, one in decodes
        if (pair := match(prefill, decode, qps, request.max_gpus))
    ]
    if not pairs:
        return []
    pair, one = min(pairs, key=lambda found: (found[0].gpus if qps else found[0].gpus / found[0].rate, found[0].gpus))
    return [_candidate(request, gpu, one, pair)]


def _candidate(request: PlanRequest, gpu: Gpu, one: Fitted, pair: Disaggregated) -> Candidate:
    load = request.workload
    rate = load.qps or pair.rate
    point, best = pair.point(load, rate), pair.point(load, pair.rate)
    return Candidate(
        gpu=gpu,
        layout=one.layout,
        limits=one.limits,
        memory=one.memory,
        replicas=1,
        gpus=pair.gpus,
        point=point,
        best=best,
        capacity=pair.rate,
        cost=fleet_cost(gpu.price, pair.gpus, rate, pair.rate, point, load, request.api),
        paged=one.paged,
        contiguous=one.contiguous,
        kv_token=kv.token_bytes(request.model, request.kv, one.layout),
        workers=pair,
    )
