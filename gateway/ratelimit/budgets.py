"""Money: what a caller's period has cost is the ledger's to say; between two looks, what was
settled here counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from math import inf
from typing import Protocol

from llmops.gateway.interfaces import Quota
from llmops.gateway.ratelimit.backend import Limiter
from llmops.gateway.ratelimit.buckets import Limit

log = logging.getLogger(__name__)

# seconds between two looks at the ledger
LEDGER_INTERVAL = 30.0
_MAX_BUDGETS = 10_000


# of tokens of the prompt, those of them from a cache, and tokens of the answer; must not fall as
# they grow
Tariff = Callable[[int, int, int], int]


class CostSource(Protocol):
    """What tokens cost and what was spent, in micro-dollars."""

    def tariff(self, model: str) -> Tariff:
        """What usage of it costs now.

        Raises ApiError where that is not known: a budget would not bound it.
        """
        ...

    async def spent(self, of: str, since: datetime) -> int:
        """What `Quota.of` has spent, as the ledger knows it now. May raise when it is away."""
        ...


class Budgets:
    """Which period it is for which budget; each is known before the first request that it bounds."""

    def __init__(
        self, limiter: Limiter, costs: CostSource, now: Callable[[], datetime], clock: Callable[[], float]
    ) -> None:
        self._limiter, self._costs, self._now, self._clock = limiter, costs, now, clock
        self.tariff = costs.tariff
        # the period of each name, and when the ledger was asked for it
        self._looked: dict[str, tuple[int, float]] = {}
        self._generation = limiter.generation
        # looks that are under way, and what was settled meanwhile, which they may not have seen
        self._looking = 0
        self._settled: Counter[str] = Counter()
        self._looks: set[asyncio.Task[None]] = set()

    async def known(self, budgets: Sequence[tuple[Quota, Limit]]) -> float:
        """Their bounds are of the period that is now, of which the ledger has been asked; the
        clock's time until when that is enough.
        """
        until = inf
        if self._generation != self._limiter.generation:
            self._generation = self._limiter.generation
            self._looked.clear()
        for quota, bound in budgets:
            assert quota.budget is not None
            now, clock = self._now(), self._clock()
            since = quota.budget.begins(now)
            bound.period = since.toordinal()
            period, looked = self._looked.get(bound.name, (0, 0.0))
            if period != bound.period:
                await self._look(quota, bound, since)
                looked = clock
            elif clock - looked >= LEDGER_INTERVAL:
                self._look_soon(quota, bound, since)
                looked = clock
            until = min(until, looked + LEDGER_INTERVAL, clock + (quota.budget.ends(now) - now).total_seconds())
        return until

    def settled(self, budgets: Sequence[tuple[Quota, Limit]], micros: int) -> None:
        if self._looking:
            self._settled.update({bound.name: micros for _, bound in budgets})

    async def close(self) -> None:
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)

    def _look_soon(self, quota: Quota, bound: Limit, since: datetime) -> None:
        self._looked[bound.name] = bound.period, self._clock()
        look = asyncio.create_task(self._look(quota, bound, since), name="budget")
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    async def _look(self, quota: Quota, bound: Limit, since: datetime) -> None:
        """A ledger that is away stops nobody: what is known goes on to count."""
        asked, before = self._clock(), self._settled[bound.name]
        self._looking += 1
        try:
            spent = await self._costs.spent(quota.of, since)
        except Exception as error:  # noqa: BLE001  whatever it is made of
            log.warning("What %s has spent cannot be read (%s); it is counted here until it can.", quota.of, error)
        else:
            if bound.period == since.toordinal():
                self._limiter.spent(bound, spent + self._settled[bound.name] - before)
        finally:
            self._looking -= 1
            if not self._looking:
                self._settled.clear()
        if len(self._looked) >= _MAX_BUDGETS:
            self._looked.clear()
        self._looked[bound.name] = since.toordinal(), asked
