"""The sentence for a search without a result: the constraint that binds, its numbers, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmops.build.plan.gpu_specs import GpuSpec
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.search.candidate import Candidate, LayoutRejected
from llmops.build.plan.search.plan_request import PlanRequest

GB = 1e9


@dataclass(frozen=True)
class TriedLayout:
    """A layout on a kind of GPU, and why it is out."""

    gpu: GpuSpec
    layout: ParallelLayout
    refused: LayoutRejected


def explain_infeasible(
    request: PlanRequest, tried: list[TriedLayout], apart: Candidate | None, alternative: Callable[[], Candidate | None]
) -> str:
    """Return one sentence for a search without a result.

    Layouts are checked in a fixed order: structure, memory, targets, GPUs for the rate, rules of the build. The
    layouts that came furthest say what binds.

    Args:
        request: What was asked for.
        tried: All layouts with the reasons against them.
        apart: Separate prefill and decode workers that would do, which llmops does not deploy.
        alternative: Searches for a deployment on other GPUs that would do.
    """
    unbuildable = [one for one in tried if one.refused.unbuildable]
    if unbuildable:
        return _unbuildable(request, unbuildable, alternative)
    needs = [one.refused.needs for one in tried if one.refused.needs]
    load = request.workload
    if needs:
        return (
            f"{load.qps:g} requests/s need at least {min(needs)} GPUs, {request.max_gpus} are given; raise --gpus or "
            "lower --qps."
        )
    missed = [one.refused.missed for one in tried if one.refused.missed]
    if missed:
        ttft, tpot = min(point.ttft_p95 for point in missed), min(point.tpot_p95 for point in missed)
        also = ""
        if apart is not None:
            also = (
                f" Only prefill and decode on separate workers keep the targets ({apart.name}, {apart.gpus} x "
                f"{apart.gpu.name}), which llmops does not deploy."
            )
        return (
            f"no layout keeps the latency targets: the best reachable are TTFT p95 {1e3 * ttft:.0f} ms and TPOT "
            f"{1e3 * tpot:.1f} ms, not always by the same layout; raise the targets, allow more GPUs or take a smaller "
            f"--quant.{also}"
        )
    if any(one.refused.memory for one in tried):
        return _too_large(request, tried, alternative)
    reasons = "; ".join(sorted({one.refused.reason for one in tried})[:3])
    return f"no layout of {request.name} can run: {reasons}."


def _unbuildable(request: PlanRequest, tried: list[TriedLayout], alternative: Callable[[], Candidate | None]) -> str:
    """A reason that all layouts share is about what the user asked for; others are about the smallest layout."""
    smallest = min(tried, key=lambda one: one.layout.gpus)
    reason = smallest.refused.unbuildable.rstrip(".")
    sizes = {"--tp": request.tp, "--pp": request.pp, "--ep": request.ep}
    of_the_layout = sizes.get(reason.partition(" ")[0], 1) is None
    if len({one.refused.unbuildable for one in tried}) == 1 and not of_the_layout:
        return f"{reason}."
    return (
        f"{request.name} fits on {smallest.layout.gpus} x {smallest.gpu.name} as {smallest.layout}, but cannot "
        f"be built so: {reason}.{_instead(request, alternative)}"
    )


def _too_large(request: PlanRequest, tried: list[TriedLayout], alternative: Callable[[], Candidate | None]) -> str:
    short = [(one.refused.memory.short, one) for one in tried if one.refused.memory]
    least, best = min(short, key=lambda pair: (pair[0], pair[1].layout.gpus))
    memory = best.refused.memory
    assert memory is not None
    rest = memory.total - memory.left - memory.kv_cache - memory.weight_bytes
    wider = any(one.refused.wider for one in tried)
    widest = "at the widest split on them" if wider else "at its widest split"
    fleet = f"{request.max_gpus} GPU{'s' * (request.max_gpus > 1)}"
    advice = _instead(request, alternative)
    if not advice:
        advice = " Take a larger kind of GPU or a smaller --quant." if not wider else " Raise --gpus."
    return (
        f"{request.name} does not fit on {fleet}: {widest} ({best.layout}), each {best.gpu.name} of "
        f"{memory.total / GB:.1f} GB would hold {memory.weight_bytes / GB:.1f} GB of weights "
        f"({request.precision.label}) and {rest / GB:.1f} GB of buffers, {least / GB:.1f} GB too much.{advice}"
    )


def _instead(request: PlanRequest, alternative: Callable[[], Candidate | None]) -> str:
    found = alternative()
    if found is None:
        return ""
    flags = [f"--gpu {found.gpu.name}"] if found.gpu not in request.gpus else []
    flags += [f"--gpus {found.gpus}"] if found.gpus > request.max_gpus else []
    return f" {found.name} on {found.gpus} x {found.gpu.name} works: {' '.join(flags)}."
