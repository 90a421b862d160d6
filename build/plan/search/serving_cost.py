"""The cost of a fleet per token, and the volume from which it is cheaper than an API."""

from dataclasses import dataclass

from llmops.build.plan.speed.replica_model import OperatingPoint
from llmops.build.plan.speed.workload import PlanWorkload

HOUR = 3600
DAY = 86400


@dataclass(frozen=True)
class ApiPrice:
    """The price of an API in $ per million input and output tokens."""

    input: float
    output: float

    def request(self, load: PlanWorkload) -> float:
        """Return the $ of a mean request."""
        return (load.isl * self.input + load.osl * self.output) / 1e6


@dataclass(frozen=True)
class FleetCost:
    """The cost of a fleet in $/h and in $ per million tokens.

    GPU time is split between prompts and answers as the engine spends it.

    `break_even_*` is the volume above which the fleet is cheaper than the API, None if it never is.
    """

    hourly: float
    input_per_million: float
    output_per_million: float
    request: float
    break_even_rate: float | None = None
    break_even_tokens_per_day: float | None = None

    @property
    def monthly(self) -> float:
        """Return the $ per month of 730 hours."""
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
    """Return the cost of a fleet.

    Args:
        price: $/h per GPU.
        gpus: GPUs of the fleet.
        rate: Requests/s that the fleet serves.
        capacity: Requests/s that it can serve.
        point: The operating point of a replica.
        load: The workload.
        api: The price of an API to compare with, or None.
    """
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
