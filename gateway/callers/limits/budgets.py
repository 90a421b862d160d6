"""Money: what a caller's period has cost is the ledger's to say; between two looks, what was settled here counts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from llmops.gateway.callers.limits.base import Limiter
from llmops.gateway.messages import Budget, Quota, Usage

log = logging.getLogger(__name__)

# seconds between two looks at the ledger
LOOK = 30.0
_MOST = 10_000


# must not fall as tokens grow
Tariff = Callable[[Usage], int]


class Costs(Protocol):
    """What tokens cost and what was spent, in micro-dollars."""

    def tariff(self, model: str) -> Tariff:
        """What usage of it costs now. Raises ApiError where that is not known: a budget would not bound it."""
        ...

    async def spent(self, of: str, since: datetime) -> int:
        """What `Quota.of` has spent, as the ledger knows it now. May raise when it is away."""
        ...


class Budgets:
    """The keys under which budgets are kept, one per period; each is known before the first request that it bounds."""

    def __init__(self, limiter: Limiter, costs: Costs, now: Callable[[], datetime], clock: Callable[[], float]) -> None:
        self._limiter, self._costs, self._now, self._clock = limiter, costs, now, clock
        self.tariff = costs.tariff
        self._periods: dict[tuple[str, str | None, str], tuple[str, datetime, datetime]] = {}
        self._looked: dict[str, float] = {}
        # what was settled since the last look began, which it may not have seen
        self._since: dict[str, int] = {}
        self._looks: set[asyncio.Task[None]] = set()

    def known(self, quota: Quota) -> str | None:
        """The key of the period that is now; None where `look` must come first."""
        assert quota.budget is not None
        key, since = self._period(quota, quota.budget)
        looked = self._looked.get(key)
        if looked is None:
            return None
        if self._clock() - looked >= LOOK:
            self._looked[key] = self._clock()
            look = asyncio.create_task(self._look(key, quota, since), name="budget")
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)
        return key

    async def look(self, quota: Quota) -> str:
        """The same, once the ledger has been asked."""
        assert quota.budget is not None
        key, since = self._period(quota, quota.budget)
        await self._look(key, quota, since)
        return key

    def _period(self, quota: Quota, budget: Budget) -> tuple[str, datetime]:
        """The key of the period that is now, and when that began; worked out once for all of its requests."""
        now, what = self._now(), (quota.of, quota.model, budget.period)
        known = self._periods.get(what)
        if known is None or not known[1] <= now < known[2]:
            if len(self._periods) >= _MOST:
                self._periods.clear()
            since = budget.begins(now)
            key = f"{quota.of}:{quota.model or ''}:{since:%Y-%m-%d}"
            known = self._periods[what] = key, since, budget.ends(now)
        return known[0], known[1]

    def settled(self, key: str, micros: int) -> None:
        if key in self._since:
            self._since[key] += micros

    async def close(self) -> None:
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)

    async def _look(self, key: str, quota: Quota, since: datetime) -> None:
        """A ledger that is away stops nobody: what is known goes on to count."""
        if len(self._looked) >= _MOST:
            self._looked.clear()
            self._since.clear()
        self._looked[key] = self._clock()
        self._since[key] = 0
        try:
            spent = await self._costs.spent(quota.of, since)
        except Exception as error:  # noqa: BLE001  whatever it is made of
            log.warning("What %s has spent cannot be read (%s); it is counted here until it can.", quota.of, error)
            return
        self._limiter.spent(key, spent + self._since.get(key, 0))
