"""An estimate of the rejected clients that will return, over which their returns are spread.

After an outage, far more clients than fit into the queue can be waiting to return. If all returned
as soon as the queue has room, a gateway would do nothing but reject requests. If the returns were
spread too far, the queue would run empty meanwhile.
"""

from __future__ import annotations

import math
import random

#: Minimum rate of returns per second, also without throughput. A rejection takes about 2 ms, so
#: this rate takes a tenth of a core.
RETURNS_PER_SECOND = 50.0
#: Rate of returns as a multiple of the rate at which requests leave the queue. Above 1, so that
#: errors of the prediction lead to rejections instead of an empty queue.
RETURN_FACTOR = 2.0
#: Range of the random factor of a predicted wait, so that clients do not all return at once.
RETRY_AFTER_JITTER = (0.8, 1.2)
#: Weight of the newest Retry-After in the mean Retry-After of a tenant, which covers about the last
#: 100 rejections.
SMOOTHING = 0.01
#: Maximum number of a tenant's clients that count for the Retry-After of other tenants, so that
#: clients that ignore Retry-After do not delay other tenants.
MAX_OF_TENANT = 2000
#: Seconds for which the sum over all tenants is reused, because summing at each rejection would be
#: slow.
SUM_INTERVAL = 0.5
#: Maximum seconds over which the returns are spread, so that no client is sent away for longer.
MAX_SPREAD = 3600.0


class RejectedClients:
    """An estimate, by tenant, of a tier's rejected clients, which decays as clients return.

    A client that ignores Retry-After is counted again with each request, so that the estimate of
    its tenant grows without bound. Only MAX_OF_TENANT of a tenant's clients therefore count for
    other tenants.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantClients] = {}
        # Sum over all tenants with at most MAX_OF_TENANT clients of each, and the time of the sum.
        self._sum = self._summed_at = 0.0

    def count(self, tenant: str, now: float) -> float:
        """Return the number of rejected clients that have not returned yet.

        The number determines a Retry-After of `tenant`, so all clients of `tenant` count, and at
        most MAX_OF_TENANT clients of each other tenant.
        """
        if not 0 <= now - self._summed_at < SUM_INTERVAL:
            self._tenants = {name: one for name, one in self._tenants.items() if one.update(now) >= 0.01}
            self._sum = sum(min(one.count, MAX_OF_TENANT) for one in self._tenants.values())
            self._summed_at = now
        own = self._tenants.get(tenant)
        return self._sum + (max(own.update(now) - MAX_OF_TENANT, 0.0) if own is not None else 0.0)

    def add(self, tenant: str, now: float, retry_after: float) -> None:
        """Count a client that returns after `retry_after` seconds."""
        own = self._tenants.setdefault(tenant, _TenantClients(now))
        if own.update(now) < MAX_OF_TENANT:
            self._sum += 1
        own.add(retry_after)


class _TenantClients:
    """The estimate of one tenant's clients that are away."""

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
        away: Number of clients that will return before this client or with it.
        departures: Rate at which requests leave the queue, per second.
        rng: The source of random numbers.
    """
    spread = min(away / max(RETURN_FACTOR * departures, RETURNS_PER_SECOND), MAX_SPREAD)
    return wait * rng.uniform(*RETRY_AFTER_JITTER) + rng.uniform(0.0, spread)
