"""Compute the curves of reports: throughput against speed for one user, and cost against rate."""

import math
from collections.abc import Iterable

from llmops.build.plan.search.candidate import Candidate
from llmops.build.plan.search.layout_search import BatchCurve, PlanResult
from llmops.build.plan.search.serving_cost import HOUR
from llmops.build.plan.speed.replica_model import OperatingPoint

MARKS = "●▲■◆"
#: Height of a plot in the terminal, in lines: half of the usual terminal.
PLOT_ROWS = 12


def frontiers(curves: Iterable[BatchCurve]) -> dict[str, list[tuple[OperatingPoint, str]]]:
    """Return the Pareto frontier of each kind of GPU, as pairs of an operating point and a layout.

    The pairs are sorted from the fastest for one user to the highest throughput per GPU.
    """
    points: dict[str, list[tuple[OperatingPoint, str]]] = {}
    for curve in curves:
        points.setdefault(curve.gpu, []).extend((point, curve.layout) for point in curve.points)
    return {gpu: _frontier(found) for gpu, found in points.items()}


def _frontier(points: list[tuple[OperatingPoint, str]]) -> list[tuple[OperatingPoint, str]]:
    best, kept = 0.0, []
    for point, name in sorted(points, key=lambda pair: (-pair[0].per_user, -pair[0].per_gpu)):
        if point.per_gpu > best:
            best = point.per_gpu
            kept.append((point, name))
    return kept


def character_plot(lines: dict[str, list[tuple[OperatingPoint, str]]], width: int) -> list[str]:
    """Return a plot for a terminal of `width` columns, as lines of text.

    The axes are tokens/s per user to the right, and tokens/s per GPU upwards. Each of `lines` has
    its own mark.
    """
    points = [point for line in lines.values() for point, _ in line]
    if not points:
        return []
    right, top = max(point.per_user for point in points), max(point.per_gpu for point in points)
    margin = len(f"{top:,.0f}") + 1
    inner, height = max(20, width - margin - 2), PLOT_ROWS
    cells = [[" "] * inner for _ in range(height)]
    for mark, line in zip(_marks(), lines.values(), strict=False):
        for point, _ in line:
            column = min(inner - 1, int(point.per_user / right * (inner - 1)))
            row = height - 1 - min(height - 1, int(point.per_gpu / top * (height - 1)))
            cells[row][column] = mark
    rows = [f"{_tick(top, row, height):>{margin}}│{''.join(cells[row])}" for row in range(height)]
    axis = f"0{f'{right:,.0f} tokens/s per user':>{inner - 1}}"
    return [*rows, " " * margin + "└" + "─" * inner, " " * (margin + 1) + axis]


def _marks() -> Iterable[str]:
    while True:
        yield from MARKS


def _tick(top: float, row: int, height: int) -> str:
    return f"{top * (height - 1 - row) / (height - 1):,.0f}" if row in (0, height // 2, height - 1) else ""


#: Number of points along the axis of request rates, enough for a smooth curve.
STEPS = 200
#: End of the axis of request rates, as a multiple of the requested rate.
BEYOND = 2.0
#: End of the axis of request rates if no rate was requested, in replicas of the best layout.
REPLICAS = 4


def cost_by_rate(plan: PlanResult) -> dict[str, list[tuple[float, float]]]:
    """Return the curve of each kind of GPU, as pairs of requests/s and $/h.

    A curve ends where a rate needs more GPUs than the request allows.

    If the price of an API was given, the API has a curve too.
    """
    kinds: dict[str, list[Candidate]] = {}
    for candidate in plan.candidates:
        kinds.setdefault(candidate.gpu.name, []).append(candidate)
    last = _highest_rate(plan)
    rates = [last * step / STEPS for step in range(1, STEPS + 1)]
    lines = {name: _line(some, rates, plan.request.max_gpus) for name, some in kinds.items()}
    if plan.request.api:
        request = plan.request.api.request(plan.request.workload)
        lines["API"] = [(rate, rate * request * HOUR) for rate in rates]
    return lines


def _highest_rate(plan: PlanResult) -> float:
    requested = plan.request.workload.qps
    return BEYOND * requested if requested else REPLICAS * plan.best.best.rate


def _line(candidates: list[Candidate], rates: list[float], max_gpus: int) -> list[tuple[float, float]]:
    """Return the curve of the lowest cost as pairs of requests/s and $/h.

    The cost is constant up to the rate that needs another replica, so the curve has steps. The
    curve ends before the first of `rates` for which `candidates` need more than `max_gpus` GPUs.
    """
    points: list[tuple[float, float]] = []
    for rate in rates:
        cost = _cheapest(candidates, rate, max_gpus)
        if cost is None:
            break
        if points and cost != points[-1][1]:
            points.append((points[-1][0], cost))
        points.append((rate, cost))
    return points


def _cheapest(candidates: list[Candidate], rate: float, max_gpus: int) -> float | None:
    gpus = [
        (candidate, math.ceil(rate / candidate.best.rate - 1e-9) * candidate.layout.gpus) for candidate in candidates
    ]
    return min((candidate.gpu.price * count for candidate, count in gpus if count <= max_gpus), default=None)
