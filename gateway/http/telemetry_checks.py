"""Checks that observe requests: metrics, traces and the access log.

The checks for traces and the access log exist only if the settings enable them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import random
from time import monotonic, perf_counter, time

from starlette.types import Scope

from llmops.distribution import missing_extra
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome
from llmops.gateway.settings import GatewaySettings, TraceSettings
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.access_log import AccessLogFile
from llmops.gateway.telemetry.export_queue import ExportQueue
from llmops.gateway.telemetry.metrics import GatewayMetrics
from llmops.gateway.telemetry.request_timeline import FinishedRequest, is_server_failure
from llmops.gateway.telemetry.trace_context import TraceContext, parse_traceparent

#: Seconds between two exports of traces. Traces of several requests are exported together.
TRACE_EXPORT_INTERVAL = 1.0
#: Seconds between two writes to the access log. Short enough to follow the log while requests run.
LOG_FLUSH_INTERVAL = 0.2
#: Seconds that an export of traces may take before it fails, so that a slow receiver does not block
#: the export for long.
EXPORT_TIMEOUT = 10.0
#: Seconds that the last export may take when the gateway shuts down. Bounds the delay of the
#: shutdown if the receiver cannot be reached.
SHUTDOWN_EXPORT_TIMEOUT = 2.0
#: Maximum number of access log lines that wait to be written. Bounds memory if the disk is slow;
#: further lines are dropped and counted.
MAX_QUEUED_LOG_LINES = 16_384
#: Routes that are not logged, because probes and scrapers request them continually.
_UNLOGGED_ROUTES = frozenset({"/", "/health", "/health/live", "/health/ready", "/metrics"})


class RequestCounter(Check):
    """A check that counts requests by route and status, and measures the gateway's own time."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._total = metrics.overhead.labels("total")
        self._stage = cache(metrics.stages.labels)
        # Unknown paths share one label, because clients could create any number of labels
        # otherwise.
        self._requests = cache(lambda route, status: metrics.requests.labels(route or "unknown", str(status)))

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        """Count the request, and record the duration of its stages if an engine worked on it."""
        if context.engine_seconds:
            self._total.observe(context.overhead_seconds)
            stage, detokenize = self._stage, context.detokenize_seconds
            # `upstream` is the engine's time, and `write` the rest of the gateway's overhead.
            write = context.overhead_seconds - sum(context.stages.values()) - detokenize
            stages = {**context.stages, "upstream": context.engine_seconds, "detokenise": detokenize, "write": write}
            for name, seconds in stages.items():
                stage(name).observe(seconds)
        self._requests(context.route, outcome.status).value += 1


class ExportingCheck(Check):
    """A check that exports ended requests through a queue."""

    def __init__(
        self, metrics: GatewayMetrics, signal: str, queue: ExportQueue[FinishedRequest], stop: Callable[[], None]
    ) -> None:
        """Create the check.

        Args:
            metrics: The gateway's metrics, which count exported and dropped requests.
            signal: The value of the metrics' label for this export.
            queue: Delivers batches of requests in its own thread.
            stop: Closes the file or connection to which `queue` delivers.
        """
        self._queue, self._stop = queue, stop
        exports = metrics.numbers(metric_definitions.TELEMETRY_EXPORTS)
        exports.labels(signal, "sent").read = lambda: queue.delivered
        exports.labels(signal, "dropped").read = lambda: queue.dropped

    def start(self) -> None:
        """Start the thread of the queue."""
        self._queue.start()

    def close(self) -> None:
        """Export the queued requests and stop.

        Blocks for at most SHUTDOWN_EXPORT_TIMEOUT seconds.
        """
        self._queue.close(SHUTDOWN_EXPORT_TIMEOUT)
        self._stop()


class PerSecondLimit:
    """A limit that allows at most `limit` events in each second."""

    def __init__(self, limit: int) -> None:
        self._limit, self._left, self._second = limit, 0, -1

    def take(self) -> bool:
        """Count an event. Return False if the event is over the limit."""
        second = int(monotonic())
        if second != self._second:
            self._second, self._left = second, self._limit
        self._left -= 1
        return self._left >= 0


class TraceCheck(ExportingCheck):
    """A check that exports traces of requests.

    Two groups of requests are exported: sampled requests, and notable requests, which failed,
    missed their latency objective or failed over. Each group is limited to `settings.per_second`
    requests, so that neither clients nor an outage can overload the export.
    """

    def __init__(
        self,
        settings: TraceSettings,
        metrics: GatewayMetrics,
        queue: ExportQueue[FinishedRequest],
        stop: Callable[[], None],
    ) -> None:
        super().__init__(metrics, "trace", queue, stop)
        self._ratio = settings.ratio
        self._sampled, self._notable = PerSecondLimit(settings.per_second), PerSecondLimit(settings.per_second)

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Decide whether to sample a request: by its `traceparent`, or at random without it."""
        if scope["method"] != "POST":
            return
        parent = parse_traceparent(scope["headers"])
        trace = context.trace = TraceContext(parent, scope["scheme"], scope["path"])
        if (trace.sampled if parent else random() < self._ratio) and self._sampled.take():
            trace.choose()
            context.traceparent = trace.onward

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        """Export the request if it is sampled or notable."""
        trace = context.trace
        if trace is None:
            return
        if not trace.chosen:
            if not (_is_notable(context, outcome) and self._notable.take()):
                return
            trace.choose()
        self._queue.put(finished_request(context, outcome))

    def passed(self, name: str) -> Check:
        """Return a check that ends the stage `name` of the trace.

        The check must run after the checks that make up the stage.
        """
        return _StageTimer(name)


class _StageTimer(Check):
    def __init__(self, name: str) -> None:
        self._name = name

    async def before(self, scope: Scope, context: RequestContext) -> None:
        if context.trace is not None:
            context.trace.passed(self._name)


class AccessLogCheck(ExportingCheck):
    """A check that logs every request, except requests of probes and scrapers."""

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        """Queue the request's line for the access log."""
        if context.route not in _UNLOGGED_ROUTES:
            self._queue.put(finished_request(context, outcome))


def finished_request(context: RequestContext, outcome: Outcome) -> FinishedRequest:
    """Return the record of a request that has just ended."""
    return FinishedRequest(
        at=time(),
        started=context.started,
        ended=perf_counter(),
        request_id=context.request_id,
        route=context.route,
        caller=context.caller,
        model=context.model,
        outcome=outcome,
        stages=context.stages,
        meter=context.meter,
        replica=context.replica,
        moves=context.failovers,
        continued=context.splice,
        trace=context.trace,
    )


def _is_notable(context: RequestContext, outcome: Outcome) -> bool:
    meter = context.meter
    missed_objective = meter is not None and meter.outcome in ("late", "slow")
    return missed_objective or bool(context.failovers) or is_server_failure(outcome)


def create_trace_check(settings: GatewaySettings, metrics: GatewayMetrics) -> TraceCheck | None:
    """Return the check that exports traces, or None if the setting `traces` is absent.

    Raises:
        MissingDependencyError: OpenTelemetry is not installed.
    """
    if settings.traces is None:
        return None
    try:
        from llmops.gateway.telemetry.otlp_exporter import OtlpSpanExporter
    except ImportError as error:
        raise missing_extra("The setting `traces` needs OpenTelemetry, which is not installed", "otel") from error
    exporter = OtlpSpanExporter(settings.traces.endpoint, EXPORT_TIMEOUT)
    queue = ExportQueue("traces", exporter.send, settings.traces.queue, TRACE_EXPORT_INTERVAL)
    return TraceCheck(settings.traces, metrics, queue, exporter.close)


def create_access_log_check(settings: GatewaySettings, metrics: GatewayMetrics) -> AccessLogCheck | None:
    """Return the check that writes the access log, or None if the setting `access_log` is absent.

    Raises:
        ResourceError: The file cannot be written.
    """
    if settings.access_log is None:
        return None
    file = AccessLogFile(settings.access_log)
    queue = ExportQueue("access log", file.write, MAX_QUEUED_LOG_LINES, LOG_FLUSH_INTERVAL)
    return AccessLogCheck(metrics, "access_log", queue, file.close)
