"""The Prometheus metrics of a control process.

The metrics cover requests, the leadership of the process, and the spending of tenants.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from time import monotonic

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response

from llmops.clocks import utc_now
from llmops.control.store_access import SharedStore
from llmops.gateway.errors import ApiError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome
from llmops.gateway.telemetry import metric_definitions
from llmops.input_files import MALFORMED
from llmops.store.accounts.limits import Budget
from llmops.store.accounts.tenants import list_tenants
from llmops.store.dead_letters import count_dead_letters
from llmops.store.tables import SUMMED
from llmops.store.usage_queries import UsageFilter, UsageSum, sum_usage

log = logging.getLogger(__name__)

#: Seconds for which sums of the ledger are reused, because Prometheus may scrape more often than
#: the store should be queried.
CACHE_SECONDS = 60.0

#: Maximum number of tenants and of models with a series of their own: those with the highest
#: spending. All others share one series.
MAX_SERIES = 20
OTHERS_LABEL = "other"

#: Label of usage whose user is not in the store.
UNKNOWN_LABEL = "unknown"


class SpendingCollector(Collector):
    """A collector of the spending of tenants and models since the first of the month (UTC).

    The spending on a budget counts from the start of the budget's period. If the store does not
    answer, the values of the last successful read are exported.
    """

    def __init__(self, store: SharedStore, now: Callable[[], datetime] = utc_now) -> None:
        self._store, self._now = store, now
        self._read_at: float | None = None
        self._tenants: Sequence[UsageSum] = ()
        self._models: Sequence[UsageSum] = ()
        self._budgets: Mapping[str, float] = {}
        self._dead_letters: Mapping[str, int] = {}

    async def refresh(self) -> None:
        """Read the sums again if they are older than CACHE_SECONDS.

        Errors of the store are logged and not raised.
        """
        if self._read_at is not None and monotonic() - self._read_at < CACHE_SECONDS:
            return
        self._read_at = monotonic()
        now = self._now()
        month = UsageFilter(first=Budget(1, "month").begins(now).date())
        try:
            async with self._store.read() as connection:
                # read first, because an alert depends on the dead letters
                self._dead_letters = await count_dead_letters(connection)
                self._tenants = await sum_usage(connection, month, ("tenant",))
                self._models = await sum_usage(connection, month, ("model",))
                self._budgets = await _read_budget_shares(connection, now)
        except (ApiError, *MALFORMED) as error:
            why = (
                error.message
                if isinstance(error, ApiError)
                else f"A row in the store is damaged ({type(error).__name__}); restore it from a backup."
            )
            log.warning("The spending of tenants cannot be read, so metrics show the last values: %s", why)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the last refresh."""
        spent, tokens = _family(metric_definitions.SPENT), _family(metric_definitions.SPENT_TOKENS)
        for tenant, usage in _top_spenders(self._tenants, "tenant"):
            spent.add_metric([tenant], usage.cost_micros / 1e6)
            # the kinds exclude each other, so that their sum is the number of tokens
            tokens.add_metric([tenant, "input"], usage.input_tokens - usage.cached_tokens)
            tokens.add_metric([tenant, "cached"], usage.cached_tokens)
            tokens.add_metric([tenant, "output"], usage.output_tokens)
        by_model = {model: usage.cost_micros / 1e6 for model, usage in _top_spenders(self._models, "model")}
        yield from (spent, tokens)
        for definition, values in (
            (metric_definitions.SPENT_BY_MODEL, by_model),
            (metric_definitions.BUDGET_USED, self._budgets),
            (metric_definitions.PARKED_EVENTS, self._dead_letters),
        ):
            family = _family(definition)
            for label, value in values.items():
                family.add_metric([str(label)], value)
            yield family


class ControlMetrics(Check):
    """The metrics of a control process.

    The object is both a check, which counts requests, and the endpoint that shows the metrics.
    """

    def __init__(self, spending: SpendingCollector) -> None:
        self.registry = CollectorRegistry()
        self._spending = spending
        self.registry.register(spending)
        self._requests = Counter(
            "llmops_control_requests", "Requests to the control process.", ("route", "status"), registry=self.registry
        )
        self._leads = Gauge(
            "llmops_control_leads", "1 if this process is the leader, which runs the jobs.", registry=self.registry
        )

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        """Count a request. Only known routes become labels, so that clients cannot add series."""
        self._requests.labels(context.route or "unknown", str(outcome.status)).inc()

    def set_leading(self, leads: bool) -> None:
        """Record whether this process is the leader."""
        self._leads.set(leads)

    async def show(self, _request: Request) -> Response:
        """Return the metrics page."""
        await self._spending.refresh()
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


def _family(definition: metric_definitions.MetricDefinition) -> GaugeMetricFamily:
    return GaugeMetricFamily(definition.name, definition.meaning, labels=definition.labels)


def _top_spenders(sums: Sequence[UsageSum], group: str) -> list[tuple[str, UsageSum]]:
    """Return the MAX_SERIES sums with the highest cost by name, and all others as one sum."""
    ordered = sorted(sums, key=lambda usage: (-usage.cost_micros, -usage.input_tokens, str(usage.group[group])))
    # SQLite stores values of any type
    named = [(str(usage.group[group] or UNKNOWN_LABEL), usage) for usage in ordered[:MAX_SERIES]]
    others = ordered[MAX_SERIES:]
    if others:
        totals = {name: sum(getattr(usage, name) for usage in others) for name in SUMMED}
        named.append((OTHERS_LABEL, UsageSum({}, **totals)))
    return named


async def _read_budget_shares(connection: AsyncConnection, now: datetime) -> dict[str, float]:
    """Return the share of their current budget that tenants have spent.

    Only the MAX_SERIES tenants with the largest shares are returned. One query per kind of period
    is run, however many tenants there are.
    """
    tenants = await list_tenants(connection)
    budgets = {tenant.id: tenant.limits.budget for tenant in tenants if tenant.limits.budget is not None}
    spent = {}
    for period in {budget.period for budget in budgets.values()}:
        since = UsageFilter(first=Budget(1, period).begins(now).date())
        sums = await sum_usage(connection, since, ("tenant",))
        spent[period] = {usage.group["tenant"]: usage.cost_micros for usage in sums}
    shares = {tenant: spent[budget.period].get(tenant, 0) / budget.micros for tenant, budget in budgets.items()}
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0]))[:MAX_SERIES])
