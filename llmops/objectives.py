"""Service-level objectives: a limit, and the share of a model's requests that must meet the limit.

The gateway's settings, metrics and admission, the planner, the simulator and the load generator all
use the definition in this module.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from llmops.units import Seconds

#: Percentiles of a latency for which the settings accept an objective.
PERCENTILES = (50, 95, 99)
#: Latencies of a request: time to the first token, mean time per token after the first, longest gap
#: between tokens, and time to the last token.
LATENCIES = ("ttft", "tpot", "itl", "e2e")
AVAILABILITY = "availability"
#: Shares of the objectives that can be the limit for a single answer, in order of preference. None
#: is the limit of a load test for single requests.
_GOODPUT_PERCENTILES = (None, 0.95, 0.99)


@dataclass(frozen=True)
class Objective:
    """A service-level objective such as "99 of 100 first tokens within 700 ms".

    Attributes:
        metric: One of `LATENCIES`, or `availability`.
        seconds: The limit of the latency in seconds; 0 for availability.
        share: The share of requests that must meet the limit, from 0 to 1. None stands for a limit
            of single requests in a load test, where one share applies to all limits together.
    """

    metric: str
    seconds: float = 0.0
    share: float | None = None

    @property
    def name(self) -> str:
        """Return the objective's name as the settings write it, such as `ttft_p99`."""
        return self.metric if self.share is None or not self.seconds else f"{self.metric}_p{100 * self.share:g}"

    def __str__(self) -> str:
        return f"{self.name}:{Seconds(self.seconds)}" if self.seconds else f"{self.name}:{100 * (self.share or 0):g}%"


def goodput_limits(objectives: Iterable[Objective]) -> list[Objective]:
    """Return the objectives that a good answer meets, at most one per latency.

    If a latency has several percentiles, the 95th counts, otherwise the 99th. A median does not
    count, because half of the answers may exceed the limit.
    """
    known = {(one.metric, one.share): one for one in objectives}
    found = ((known.get((metric, share)) for share in _GOODPUT_PERCENTILES) for metric in LATENCIES)
    return [one for one in (next(filter(None, choices), None) for choices in found) if one is not None]


def parse_share(value: object) -> float:
    """Return the share, from 0 to 1, that is written as `99.9%` or 0.999.

    Raises:
        ValueError: The value is not a share between 0 and 1, both excluded.
    """
    text = str(value).strip()
    try:
        share = round(float(text[:-1]) / 100, 12) if text.endswith("%") else float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ValueError(f"{text!r} is not a share below 100 %; write 99.9% or 0.999")
    return share
