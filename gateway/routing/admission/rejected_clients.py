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
#: Clients of one tenant that count for the Retry-After of others.
MAX_OF_TENANT = 2000
#: Seconds for which the sum over all tenants is used.
SUM_INTERVAL = 0.5
#: Seconds at most over which the clients are spread.
MAX_SPREAD = 3600.0


class RejectedClients:
    """The clients of a tier that are away, by tenant. Their number decays as fast as they return.

    A client that ignores Retry-After is counted again with each try. The estimate of its tenant
    then grows without end, so that only MAX_OF_TENANT of a tenant's clients count for the others.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantClients] = {}
        # for all tenants together, at most MAX_OF_TENANT of each
        self._sum = self._summed_at = 0.0

    def count(self, tenant: str, now: float) -> float:
        """Return the number of clients that are away now, as it concerns a client of `tenant`."""
        if not 0 <= now - self._summed_at < SUM_INTERVAL:
            self._tenants = {name: one for name, one in self._tenants.items() if one.update(now) >= 0.01}
            self._sum = sum(min(one.count, MAX_OF_TENANT) for one in self._tenants.values())
            self._summed_at = now
        own = self._tenants.get(tenant)
        return self._sum + (max(own.update(now) - MAX_OF_TENANT, 0.0) if own is not None else 0.0)

    def add(self, tenant: str, now: float, retry_after: float) -> None:
        """Add a client that returns after `retry_after` seconds."""
        own = self._tenants.setdefault(tenant, _TenantClients(now))
        if own.update(now) < MAX_OF_TENANT:
            self._sum += 1
        own.add(retry_after)


class _TenantClients:
    """The clients of one tenant that are away."""

    def __init__(self, now: float) -> None:
        self.count = 0.0
        self._mean_retry = 1.0
        self._updated = now

    def update(self, now: float) -> float:
        elapsed, self._updated = max(now - self._updated, 0.0), now
        self.count *= math.exp(-elapsed / self._mean_retry)
        return self.count

    def add(self, retry_after: float) -> None:
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
    spread = min(away / max(RETURN_FACTOR * departures, RETURNS_PER_SECOND), MAX_SPREAD)
    return wait * rng.uniform(*RETRY_AFTER_JITTER) + rng.uniform(0.0, spread)
