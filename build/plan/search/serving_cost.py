"""Compute the cost of a fleet per token, and the volume from which it beats the price of an API."""

from dataclasses import dataclass

from llmops.build.plan.speed.replica_model import OperatingPoint
from llmops.build.plan.speed.workload import PlanWorkload

HOUR = 3600
DAY = 86400


@dataclass(frozen=True)
class ApiPrice:
    """The price of an API in dollars per million input and output tokens."""

    input: float
    output: float

    def request(self, load: PlanWorkload) -> float:
        """Return the cost of a mean request in dollars."""
        return (load.isl * self.input + load.osl * self.output) / 1e6


@dataclass(frozen=True)
class FleetCost:
    """The cost of a fleet in dollars: per hour, per million tokens and per request.

    The cost of GPU time is divided between prompts and answers like the engine's time.

    `break_even_rate` (requests/s) and `break_even_tokens_per_day` are the volume above which the
    fleet is cheaper than the API, or None if the fleet never is.
    """

    hourly: float
    input_per_million: float
    output_per_million: float
    request: float
    break_even_rate: float | None = None
    break_even_tokens_per_day: float | None = None

    @property
    def monthly(self) -> float:
        """Return the cost in dollars per month of 730 hours."""
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
    """Return the cost of a fleet that serves a workload.

    Args:
        price: The price of a GPU in $/h.
        gpus: The number of GPUs of the fleet.
        rate: The rate that the fleet serves, in requests/s.
        capacity: The highest rate that the fleet can serve, in requests/s.
        point: The operating point of a replica.
        load: The workload of the fleet.
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
