"""What tenants and models cost, for Prometheus: sums of the ledger, asked for once a minute at most."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from time import monotonic

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.clocks import utc_now
from llmops.control.shared_store import SharedStore
from llmops.gateway.errors import ApiError
from llmops.gateway.telemetry import metric_definitions
from llmops.store.accounts.limits import Budget
from llmops.store.accounts.tenants import list_tenants
from llmops.store.dead_letters import count_dead_letters
from llmops.store.usage_queries import UsageFilter, UsageSum, sum_usage
from llmops.store.usage_writes import SUMMED

log = logging.getLogger(__name__)

# seconds between two looks; tenants (those that spend most) and models with a series of their own, the rest share one
CACHE_SECONDS, MAX_SERIES, OTHERS_LABEL = 60.0, 20, "other"
# of usage without a user that anybody knows
UNKNOWN_LABEL = "unknown"


class SpendingCollector(Collector):
    """Since the first of the month (UTC); budgets since their period began. While the store is away, what it said."""

    def __init__(
        self, store: SharedStore, now: Callable[[], datetime] = utc_now, clock: Callable[[], float] = monotonic
    ) -> None:
        self._store, self._now, self._clock = store, now, clock
        self._looked: float | None = None
        self._tenants: Sequence[UsageSum] = ()
        self._models: Sequence[UsageSum] = ()
        self._budgets: dict[str, float] = {}
        self._parked: dict[str, int] = {}

    async def look(self) -> None:
        """Never fails: a scrape is no place to learn that a store is away."""
        if self._looked is not None and self._clock() - self._looked < CACHE_SECONDS:
            return
        self._looked = self._clock()
        now = self._now()
        month = UsageFilter(first=Budget(1, "month").begins(now).date())
        try:
            async with self._store.read() as connection:
                self._tenants = await sum_usage(connection, month, ("tenant",))
                self._models = await sum_usage(connection, month, ("model",))
                self._budgets = await _used(connection, now)
                self._parked = await count_dead_letters(connection)
        except ApiError as error:
            log.warning("What tenants spent cannot be told to Prometheus: %s", error.message)

    def collect(self) -> Iterator[Metric]:
        tenants = _most(self._tenants, "tenant")
        dollars, tokens = _family(metric_definitions.SPENT), _family(metric_definitions.SPENT_TOKENS)
        for tenant, one in tenants:
            dollars.add_metric([tenant], one.cost_micros / 1e6)
            for kind, count in _kinds(one):
                tokens.add_metric([tenant, kind], count)
        of_models, budgets = _family(metric_definitions.SPENT_BY_MODEL), _family(metric_definitions.BUDGET_USED)
        for model, one in _most(self._models, "model"):
            of_models.add_metric([model], one.cost_micros / 1e6)
        for tenant, share in self._budgets.items():
            budgets.add_metric([tenant], share)
        parked = _family(metric_definitions.PARKED_EVENTS)
        for reason, count in self._parked.items():
            parked.add_metric([reason], count)
        yield from (dollars, tokens, of_models, budgets, parked)


def _family(name: metric_definitions.MetricDefinition) -> GaugeMetricFamily:
    return GaugeMetricFamily(name.name, name.meaning, labels=name.labels)


def _kinds(one: UsageSum) -> Iterator[tuple[str, int]]:
    """Each token once."""
    yield "input", one.input_tokens - one.cached_tokens
    yield "cached", one.cached_tokens
    yield "output", one.output_tokens


def _most(sums: Sequence[UsageSum], by: str) -> list[tuple[str, UsageSum]]:
    """Those that cost most, each with its name, and the rest as one."""
    ordered = sorted(sums, key=lambda one: (-one.cost_micros, -one.input_tokens, str(one.group[by])))
    named = [(one.group[by] or UNKNOWN_LABEL, one) for one in ordered[:MAX_SERIES]]
    rest = ordered[MAX_SERIES:]
    if rest:
        named.append((OTHERS_LABEL, UsageSum({}, **{name: sum(getattr(one, name) for one in rest) for name in SUMMED})))
    return named


async def _used(connection: AsyncConnection, now: datetime) -> dict[str, float]:
    """The share of each tenant's budget that its present period has used, of those that have used most. A question for
    each kind of period, however many tenants there are."""
    budgets = {one.id: one.limits.budget for one in await list_tenants(connection) if one.limits.budget is not None}
    spent = {}
    for period in {budget.period for budget in budgets.values()}:
        since = UsageFilter(first=Budget(1, period).begins(now).date())
        spent[period] = {
            one.group["tenant"]: one.cost_micros for one in await sum_usage(connection, since, ("tenant",))
        }
    shares = {tenant: spent[one.period].get(tenant, 0) / one.micros for tenant, one in budgets.items()}
    return dict(sorted(shares.items(), key=lambda one: (-one[1], one[0]))[:MAX_SERIES])
