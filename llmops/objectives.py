"""Service-level objectives: the share of a model's requests that must meet a limit.

The gateway's settings, its metrics and admission, the planner, the simulator and the load generator
all use this one definition.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from llmops.units import Seconds

#: Percentiles for which objectives can be set.
PERCENTILES = (50, 95, 99)
#: Latencies of a request: to the first token, per token after it, the longest gap, and the whole.
LATENCIES = ("ttft", "tpot", "itl", "e2e")
AVAILABILITY = "availability"
#: Percentiles whose limit decides whether a single answer is good, the first that is set.
_GOODPUT_PERCENTILES = (None, 0.95, 0.99)


@dataclass(frozen=True)
class Objective:
    """An objective such as "99 of 100 first tokens within 700 ms".

    Attributes:
        metric: One of `LATENCIES`, or `availability`.
        seconds: The limit of a latency; 0 for availability.
        share: The share of requests that must meet the limit. None: the limit of single requests in
            a load test, which has its own share for all limits together.
    """

    metric: str
    seconds: float = 0.0
    share: float | None = None

    @property
    def name(self) -> str:
        """Return the name as settings have it, such as `ttft_p99`."""
        return self.metric if self.share is None or not self.seconds else f"{self.metric}_p{100 * self.share:g}"

    def __str__(self) -> str:
        return f"{self.name}:{Seconds(self.seconds)}" if self.seconds else f"{self.name}:{100 * (self.share or 0):g}%"


def goodput_limits(objectives: Iterable[Objective]) -> list[Objective]:
    """Return the objectives that a good answer meets, at most one per latency.

    Of several percentiles the 95th counts, else the 99th; a median says nothing about one answer.
    """
    known = {(one.metric, one.share): one for one in objectives}
    found = ((known.get((metric, share)) for share in _GOODPUT_PERCENTILES) for metric in LATENCIES)
    return [one for one in (next(filter(None, choices), None) for choices in found) if one is not None]


def parse_share(value: object) -> float:
    """Return the share written as `99.9%` or 0.999.

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
