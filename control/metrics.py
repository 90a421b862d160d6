"""What Prometheus is told of a control process."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from llmops.control.spending_collector import SpendingCollector
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome


class ControlMetrics(Check):
    """Requests by route and status, whether this process leads, and what tenants spend."""

    def __init__(self, spending: SpendingCollector) -> None:
        self.registry = CollectorRegistry()
        self._spending = spending
        self.registry.register(spending)
        self._requests = Counter(
            "llmops_control_requests", "Requests to the control process.", ("route", "status"), registry=self.registry
        )
        self._leads = Gauge(
            "llmops_control_leads", "1 where this process does what one at a time does.", registry=self.registry
        )

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        # only known routes become a label
        self._requests.labels(context.route or "unknown", str(outcome.status)).inc()

    def leads(self, leads: bool) -> None:
        self._leads.set(leads)

    async def show(self, request: Request) -> Response:
        await self._spending.look()
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)
