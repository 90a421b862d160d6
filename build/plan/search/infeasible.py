"""Explain a search without a result: the binding constraint, its figures and a remedy."""

from collections.abc import Callable
from dataclasses import dataclass

from llmops.build.plan.gpu_specs import GB, GpuSpec
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.search.candidate import Candidate, LayoutRejected
from llmops.build.plan.search.plan_request import PlanRequest


@dataclass(frozen=True)
class TriedLayout:
    """A layout on a kind of GPU, and its rejection."""

    gpu: GpuSpec
    layout: ParallelLayout
    rejection: LayoutRejected


def explain_infeasible(
    request: PlanRequest,
    rejected: list[TriedLayout],
    disaggregated: Candidate | None,
    alternative: Callable[[], Candidate | None],
) -> str:
    """Return the error message for a search without a result.

    Layouts are checked in a fixed order: structure, memory, targets, GPUs for the rate, rules of
    the build. The layouts that passed most of these checks show the binding constraint.

    Args:
        request: The request to the planner.
        rejected: All layouts with their rejections.
        disaggregated: Separate prefill and decode workers that would meet the request, or None.
            llmops does not deploy such workers.
        alternative: Searches for a deployment on other GPUs that would meet the request.
    """
    unbuildable = [attempt for attempt in rejected if attempt.rejection.unbuildable]
    if unbuildable:
        return _unbuildable(request, unbuildable, alternative)
    needs = [attempt.rejection.needs for attempt in rejected if attempt.rejection.needs]
    load = request.workload
    if needs:
        return (
            f"{load.qps:g} requests/s need at least {min(needs)} GPUs, and --gpus is {request.max_gpus}; raise "
            "--gpus or lower --qps."
        )
    missed = [attempt.rejection.missed for attempt in rejected if attempt.rejection.missed]
    if missed:
        ttft, tpot = min(point.ttft_p95 for point in missed), min(point.tpot_p95 for point in missed)
        also = ""
        if disaggregated is not None:
            also = (
                f" Only prefill and decode on separate workers meet the targets ({disaggregated.name}, "
                f"{disaggregated.gpus} x {disaggregated.gpu.name}), which llmops does not deploy."
            )
        return (
            f"No layout meets the latency targets: the best are TTFT p95 {1e3 * ttft:.0f} ms and TPOT "
            f"{1e3 * tpot:.1f} ms, perhaps of different layouts; raise the targets, raise --gpus or choose a smaller "
            f"--quant.{also}"
        )
    if any(attempt.rejection.memory for attempt in rejected):
        return _too_large(request, rejected, alternative)
    reasons = "; ".join(sorted({attempt.rejection.reason for attempt in rejected})[:3])
    return f"No layout of {request.name} can run: {reasons}."


def _unbuildable(request: PlanRequest, rejected: list[TriedLayout], alternative: Callable[[], Candidate | None]) -> str:
    """Return the error message for layouts that the build rejects.

    If all layouts are rejected for one reason, and the reason is not a parallel size that the
    planner chose, the message has only the reason. Otherwise, the message is about the smallest
    layout.
    """
    smallest = min(rejected, key=lambda attempt: attempt.layout.gpus)
    reason = smallest.rejection.unbuildable.rstrip(".")
    sizes = {"--tp": request.tp, "--pp": request.pp, "--ep": request.ep}
    of_the_layout = sizes.get(reason.partition(" ")[0], 1) is None
    if len({attempt.rejection.unbuildable for attempt in rejected}) == 1 and not of_the_layout:
        return f"{reason}."
    return (
        f"{request.name} fits on {smallest.layout.gpus} x {smallest.gpu.name} as {smallest.layout}, but this layout "
        f"cannot be built: {reason}.{_instead(request, alternative)}"
    )


def _too_large(request: PlanRequest, rejected: list[TriedLayout], alternative: Callable[[], Candidate | None]) -> str:
    short = [(attempt.rejection.memory.short, attempt) for attempt in rejected if attempt.rejection.memory]
    shortfall, best = min(short, key=lambda pair: (pair[0], pair[1].layout.gpus))
    memory = best.rejection.memory
    assert memory is not None
    rest = memory.total - memory.left - memory.kv_cache - memory.weight_bytes
    wider = any(attempt.rejection.wider for attempt in rejected)
    widest = "at the widest split on them" if wider else "at its widest split"
    fleet = f"{request.max_gpus} GPU{'s' * (request.max_gpus > 1)}"
    advice = _instead(request, alternative)
    if not advice:
        advice = " Give a larger --gpu or a smaller --quant." if not wider else " Raise --gpus."
    return (
        f"{request.name} does not fit on {fleet}: {widest} ({best.layout}), each {best.gpu.name} of "
        f"{memory.total / GB:.1f} GB would hold {memory.weight_bytes / GB:.1f} GB of weights "
        f"({request.precision.label}) and {rest / GB:.1f} GB of buffers, {shortfall / GB:.1f} GB too much.{advice}"
    )


def _instead(request: PlanRequest, alternative: Callable[[], Candidate | None]) -> str:
    found = alternative()
    if found is None:
        return ""
    flags = [f"--gpu {found.gpu.name}"] if found.gpu not in request.gpus else []
    flags += [f"--gpus {found.gpus}"] if found.gpus > request.max_gpus else []
    return f" {found.name} on {found.gpus} x {found.gpu.name} works: {' '.join(flags)}."
