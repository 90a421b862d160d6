"""Budgets: limits on the money that callers spend in a period.

The ledger is the source of a caller's spending. Between two queries of the ledger, this process
adds the cost of the requests that it settles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from math import inf
from typing import Protocol

from llmops.background import TaskSet
from llmops.gateway.interfaces import Quota
from llmops.gateway.logging_setup import request_logger
from llmops.gateway.ratelimit.backend import Limiter
from llmops.gateway.ratelimit.buckets import Limit

log = request_logger(__name__)

#: Seconds between two queries of the ledger for one budget, which bounds the load on the store.
LEDGER_INTERVAL = 30.0

#: Function that returns a cost in micro-dollars from the prompt tokens, the cached tokens among
#: them, and the output tokens. The cost must not fall as these numbers grow.
Tariff = Callable[[int, int, int], int]


class CostSource(Protocol):
    """An interface to the prices of models and the spending of callers, in micro-dollars."""

    def tariff(self, model: str, at: datetime) -> Tariff:
        """Return the function that computes the cost of a model's usage by the price at a time.

        Raises:
            ApiError: The price is unknown, so a budget would not bound the model's cost.
        """
        ...

    async def spent(self, of: str, since: datetime) -> int:
        """Return the micro-dollars that an owner has spent since a time, from the ledger.

        Any exception may be raised when the ledger is unavailable.

        Args:
            of: The owner of the budget, as in `Quota.of`.
            since: The start of the period.
        """
        ...


class Budgets:
    """The budgets of all callers, with their current periods and the ledger's spending.

    The ledger is queried for a budget before the first request that the budget limits.
    """

    def __init__(
        self, limiter: Limiter, costs: CostSource, now: Callable[[], datetime], clock: Callable[[], float]
    ) -> None:
        self._limiter, self._costs, self._now, self._clock = limiter, costs, now, clock
        self.tariff = costs.tariff
        # The last query of each budget, by the name of its limit: the period, and the time of the
        # query.
        self._looked: dict[str, tuple[int, float]] = {}
        self._generation = limiter.generation
        # Running queries, and the costs settled while each query runs, which its result may not
        # include.
        self._looking = 0
        self._settled: Counter[str] = Counter()
        self._looks = TaskSet()

    async def known(self, budgets: Sequence[tuple[Quota, Limit]]) -> float:
        """Set the limits of `budgets` to the current period, and query the ledger for new periods.

        Returns:
            The time of the clock until which the result is valid.
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
        """Count the cost of a settled request for queries that run now.

        The result of such a query may not include the request, so the cost is added to the result.

        Args:
            budgets: The budgets that pay for the request, with their limits.
            micros: The cost in micro-dollars.
        """
        if self._looking:
            self._settled.update({bound.name: micros for _, bound in budgets})

    async def close(self) -> None:
        await self._looks.cancel()

    def _look_soon(self, quota: Quota, bound: Limit, since: datetime) -> None:
        self._looked[bound.name] = bound.period, self._clock()
        self._looks.start(self._look(quota, bound, since), "budget")

    async def _look(self, quota: Quota, bound: Limit, since: datetime) -> None:
        """Query the ledger for the spending of one budget since the start of the period.

        If the ledger is unavailable, requests continue and the last known spending is used.
        """
        asked, before = self._clock(), self._settled[bound.name]
        self._looking += 1
        try:
            spent = await self._costs.spent(quota.of, since)
        except Exception as error:  # noqa: BLE001  the source is a plugin
            log.warning(
                "The spending of %s cannot be read (%s); this gateway counts its own requests until the ledger "
                "answers.",
                quota.of,
                error,
            )
        else:
            if bound.period == since.toordinal():
                self._limiter.spent(bound, spent + self._settled[bound.name] - before)
        finally:
            self._looking -= 1
            if not self._looking:
                self._settled.clear()
        self._looked[bound.name] = since.toordinal(), asked
