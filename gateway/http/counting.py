"""Requests as the metrics count them."""

from __future__ import annotations

from llmops.gateway.http.context import RequestContext
from llmops.gateway.http.door import Check
from llmops.gateway.messages import Outcome
from llmops.gateway.observability.metrics import Metrics


class RequestCounts(Check):
    """By route and status, and what the gateway's own time until the answer began was spent on."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        if context.waited:
            self._metrics.overhead.labels("total").observe(context.overhead)
            for stage, seconds in context.all_stages().items():
                self._metrics.stages.labels(stage).observe(seconds)
        # only known routes become a label; anything else would let clients grow the metrics at will
        self._metrics.requests.labels(context.route or "unknown", str(outcome.status)).inc()
