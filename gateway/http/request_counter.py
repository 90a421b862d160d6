"""Requests as the metrics count them."""

from __future__ import annotations

from functools import cache

from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome
from llmops.gateway.telemetry.metrics import GatewayMetrics


class RequestCounter(Check):
    """By route and status, and what the gateway's own time until the answer began was spent on."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._total = metrics.overhead.labels("total")
        self._stage = cache(metrics.stages.labels)
        # only known routes become a label; anything else would let clients grow the metrics at will
        self._requests = cache(lambda route, status: metrics.requests.labels(route or "unknown", str(status)))

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        if context.waited:
            self._total.observe(context.overhead)
            stage = self._stage
            for name, seconds in context.all_stages().items():
                stage(name).observe(seconds)
        self._requests(context.route, outcome.status).value += 1
