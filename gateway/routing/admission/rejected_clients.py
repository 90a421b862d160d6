"""An estimate of the clients that were rejected and will return, over which their returns are spread.

After an outage there can be far more of them than fit into the queue. If all returned as soon as
the queue has room, a gateway would do nothing but reject; if they were spread too far, the queue
would run empty meanwhile.
"""

from __future__ import annotations

import math
import random

#: Returns per second for which a gateway has time at least: a rejection takes it about 2 ms, so that
#: these take a tenth of a core.
RETURNS_PER_SECOND = 50.0
#: Returns as a multiple of the requests that leave the queue. Above 1, so that errors of the
#: predictions lead to rejections and not to an empty queue.
RETURN_FACTOR = 2.0
#: Range of the factor by which a predicted wait is multiplied: clients must not return at the same
#: moment.
RETRY_AFTER_JITTER = (0.8, 1.2)
#: Weight of the newest Retry-After in the mean.
SMOOTHING = 0.01


class RejectedClients:
    """The clients of a tier that are away. Their number decays as fast as they return."""

    def __init__(self) -> None:
        self.count = 0.0
        self._mean_retry = 1.0
        self._updated = 0.0

    def update(self, now: float) -> float:
        """Return the number of clients that are away now."""
        elapsed, self._updated = max(now - self._updated, 0.0), now
        self.count *= math.exp(-elapsed / self._mean_retry)
        return self.count

    def add(self, retry_after: float) -> None:
        """Add a client that returns after `retry_after` seconds."""
        self.count += 1
        self._mean_retry += SMOOTHING * (max(retry_after, 0.1) - self._mean_retry)


def spread_retry_after(wait: float, away: float, departures: float, rng: random.Random) -> float:
    """Return a Retry-After in seconds.

    Args:
        wait: Seconds until the queue has room.
        away: Clients that will return before this one or with it.
        departures: Requests that leave the queue per second.
        rng: The source of random numbers.
    """
    spread = away / max(RETURN_FACTOR * departures, RETURNS_PER_SECOND)
    return wait * rng.uniform(*RETRY_AFTER_JITTER) + rng.uniform(0.0, spread)
