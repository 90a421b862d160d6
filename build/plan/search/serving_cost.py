"""Money: what a fleet costs per token, and from which volume it beats an API's price."""

from __future__ import annotations

from dataclasses import dataclass

from llmops.build.plan.speed.replica_model import OperatingPoint
from llmops.build.plan.speed.workload import PlanWorkload

HOUR = 3600
DAY = 86400


@dataclass(frozen=True)
class ApiPrice:
    """$ per million input and output tokens."""

    input: float
    output: float

    def request(self, load: PlanWorkload) -> float:
        return (load.isl * self.input + load.osl * self.output) / 1e6


@dataclass(frozen=True)
class FleetCost:
    """$/h of the fleet; $ per million tokens, the GPU time split between prompts and answers as the engine spends it.
    `break_even_*`: the volume above which the fleet is cheaper than the API; None when it can never be."""

    hourly: float
    input_per_million: float
    output_per_million: float
    request: float
    break_even_rate: float | None = None
    break_even_tokens_per_day: float | None = None

    @property
    def monthly(self) -> float:
        return self.hourly * 730


def fleet_cost(
    price: float,
    gpus: int,
    rate: float,
    capacity: float,
    point: OperatingPoint,
    load: PlanWorkload,
    api: ApiPrice | None,
) -> FleetCost:
    """`price` $/h per GPU; `rate` and `capacity` are requests/s of the whole fleet."""
    hourly = price * gpus
    per_second = hourly / HOUR
    break_even = per_second / api.request(load) if api else None
    if break_even is not None and break_even > capacity:
        break_even = None
    return FleetCost(
        hourly=hourly,
        input_per_million=per_second * point.prefill_share / (rate * load.isl) * 1e6,
        output_per_million=per_second * (1 - point.prefill_share) / (rate * load.osl) * 1e6,
        request=per_second / rate,
        break_even_rate=break_even,
        break_even_tokens_per_day=break_even * load.length * DAY if break_even else None,
    )
