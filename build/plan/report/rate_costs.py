"""What a fleet costs at each rate: whole replicas of the layout that is cheapest there."""

from __future__ import annotations

import math

from llmops.build.plan.search.candidate import Candidate
from llmops.build.plan.search.layout_search import PlanResult
from llmops.build.plan.search.serving_cost import HOUR

# points along the axis, and how far it goes beyond what is asked, or beyond one replica's rate
STEPS, BEYOND, REPLICAS = 200, 2.0, 4


def cost_by_rate(plan: PlanResult) -> dict[str, list[tuple[float, float]]]:
    """(requests/s, $/h) for each kind of GPU, within the GPUs that are given; with an API's price, that too."""
    kinds: dict[str, list[Candidate]] = {}
    for one in plan.candidates:
        kinds.setdefault(one.gpu.name, []).append(one)
    last = _last(plan)
    rates = [last * step / STEPS for step in range(1, STEPS + 1)]
    lines = {name: _line(some, rates, plan.request.max_gpus) for name, some in kinds.items()}
    if plan.request.api:
        request = plan.request.api.request(plan.request.workload)
        lines["API"] = [(rate, rate * request * HOUR) for rate in rates]
    return lines


def _last(plan: PlanResult) -> float:
    asked = plan.request.workload.qps
    return BEYOND * asked if asked else REPLICAS * plan.best.best.rate


def _line(candidates: list[Candidate], rates: list[float], max_gpus: int) -> list[tuple[float, float]]:
    """Stairs: the cost holds up to the rate at which another replica is needed."""
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
    gpus = [(one, math.ceil(rate / one.best.rate - 1e-9) * one.layout.gpus) for one in candidates]
    return min((one.gpu.price * count for one, count in gpus if count <= max_gpus), default=None)
