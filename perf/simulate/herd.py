"""A herd: clients that wait during an outage, return together, and follow Retry-After."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from llmops.perf.simulate.fleet import Arrivals
from llmops.perf.simulate.replica import SimulatedRequest
from llmops.perf.workloads.lengths import Lengths, parse_lengths

#: Seconds within which all clients notice that the service is back.
NOTICE_SECONDS = 5.0


@dataclass(frozen=True)
class HerdArrivals:
    """Clients that send one request each, and repeat a rejected request after Retry-After.

    Attributes:
        clients: Number of clients.
        tiers: Priority tiers of the clients, with their shares.
        message: Tokens of a prompt.
        answer: Tokens of an answer.
        start: Time in seconds at which the service is back.
        seed: Seed of the random numbers.
    """

    clients: int
    tiers: Sequence[tuple[str, float]] = (("", 1.0),)
    message: Lengths = field(default_factory=lambda: parse_lengths("lognormal:250,0.6"))
    answer: Lengths = field(default_factory=lambda: parse_lengths("lognormal:334,0.6"))
    start: float = 1.0
    seed: int = 0

    def arrivals(self) -> Arrivals:
        return Arrivals(self._first(), self._again)

    def _first(self) -> Iterator[SimulatedRequest]:
        rng = random.Random(f"herd {self.seed}")
        names, shares = [name for name, _ in self.tiers], list(accumulate(share for _, share in self.tiers))
        times = sorted(rng.uniform(self.start, self.start + NOTICE_SECONDS) for _ in range(self.clients))
        for number, at in enumerate(times, 1):
            tier = rng.choices(names, cum_weights=shares)[0]
            # The sessions of a herd have negative numbers, because other arrivals use numbers from
            # 1 upwards.
            yield SimulatedRequest(at, self.message.draw(rng), self.answer.draw(rng), tier=tier, session=-number)

    def _again(self, last: SimulatedRequest) -> tuple[float, SimulatedRequest] | None:
        """Return the seconds until a rejected client's next attempt, and the request of the attempt.

        Return None if the client was not rejected.
        """
        if last.refused < 0:
            return None
        again = SimulatedRequest(
            0.0, last.tokens, last.answer, tier=last.tier, turn=last.turn + 1, session=last.session
        )
        return last.refused, again
