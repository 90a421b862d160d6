"""What hears of every end to tell it elsewhere: traces and the access log. Without their settings there is neither."""

from __future__ import annotations

from collections.abc import Callable
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

# seconds: what comes within is delivered together; a receiver may take; and what is left gets when the gateway ends
TRACE_EXPORT_INTERVAL, LOG_FLUSH_INTERVAL, EXPORT_TIMEOUT, SHUTDOWN_EXPORT_TIMEOUT = 1.0, 0.2, 10.0, 2.0
# that may wait to be written
MAX_QUEUED_LOG_LINES = 16_384
# what probes and scrapers ask for all the time
_UNLOGGED_ROUTES = frozenset({"/", "/health", "/health/live", "/health/ready", "/metrics"})


class ExportingCheck(Check):
    """One that tells of ends through an outbox, from `start` to `close`."""

    def __init__(
        self, metrics: GatewayMetrics, signal: str, outbox: ExportQueue[FinishedRequest], stop: Callable[[], None]
    ) -> None:
        """`stop` ends what `outbox` delivers with."""
        self._outbox, self._stop = outbox, stop
        told = metrics.numbers(metric_definitions.TELEMETRY_EXPORTS)
        told.labels(signal, "sent").read = lambda: outbox.delivered
        told.labels(signal, "dropped").read = lambda: outbox.dropped

    def start(self) -> None:
        self._outbox.start()

    def close(self) -> None:
        """Blocks for as long as SHUTDOWN_EXPORT_TIMEOUT."""
        self._outbox.close(SHUTDOWN_EXPORT_TIMEOUT)
        self._stop()


class PerSecondLimit:
    """At most `most` in each second."""

    __slots__ = ("_left", "_most", "_second")

    def __init__(self, most: int) -> None:
        self._most, self._left, self._second = most, 0, -1

    def take(self) -> bool:
        second = int(monotonic())
        if second != self._second:
            self._second, self._left = second, self._most
        self._left -= 1
        return self._left >= 0


class TraceCheck(ExportingCheck):
    """Traces what was chosen when it came (by its caller, or by chance), and all that failed, was slow or went on
    elsewhere. Of the ones and of the others so many per second: neither clients nor an outage can make it more."""

    def __init__(
        self,
        settings: TraceSettings,
        metrics: GatewayMetrics,
        outbox: ExportQueue[FinishedRequest],
        stop: Callable[[], None],
    ) -> None:
        super().__init__(metrics, "trace", outbox, stop)
        self._ratio = settings.ratio
        self._chosen, self._remarkable = PerSecondLimit(settings.per_second), PerSecondLimit(settings.per_second)

    async def before(self, scope: Scope, context: RequestContext) -> None:
        if scope["method"] != "POST":
            return
        parent = parse_traceparent(scope["headers"])
        trace = context.trace = TraceContext(parent)
        if (trace.sampled if parent else random() < self._ratio) and self._chosen.take():
            trace.choose()

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        trace = context.trace
        if trace is None:
            return
        if not trace.chosen:
            if not (_is_notable(context, outcome) and self._remarkable.take()):
                return
            trace.choose()
        self._outbox.put(finished_request(context, outcome))

    def passed(self, name: str) -> Check:
        """To be put behind the checks of that name."""
        return _StageTimer(name)


class _StageTimer(Check):
    def __init__(self, name: str) -> None:
        self._name = name

    async def before(self, scope: Scope, context: RequestContext) -> None:
        if context.trace is not None:
            context.trace.passed(self._name)


class AccessLogCheck(ExportingCheck):
    """A line for every request but those of probes and scrapers."""

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        if context.route not in _UNLOGGED_ROUTES:
            self._outbox.put(finished_request(context, outcome))


def finished_request(context: RequestContext, outcome: Outcome) -> FinishedRequest:
    """What is told of a request that ends now."""
    return FinishedRequest(
        time(),
        context.started,
        perf_counter(),
        context.request_id,
        context.route,
        context.caller,
        context.model,
        outcome,
        context.stages,
        context.meter,
        context.replica,
        context.moves,
        context.continued,
        context.trace,
    )


def _is_notable(context: RequestContext, outcome: Outcome) -> bool:
    meter = context.meter
    slow = meter is not None and meter.outcome in ("late", "slow")
    return slow or bool(context.moves) or is_server_failure(outcome)


def create_trace_check(settings: GatewaySettings, metrics: GatewayMetrics) -> TraceCheck | None:
    """None without the setting. Raises MissingDependencyError where OpenTelemetry is not installed."""
    if settings.traces is None:
        return None
    try:
        from llmops.gateway.telemetry.otlp_exporter import OtlpSpanExporter
    except ImportError as error:
        raise missing_extra("The setting `traces` needs OpenTelemetry, which is not installed", "otel") from error
    sender = OtlpSpanExporter(settings.traces.endpoint, EXPORT_TIMEOUT)
    outbox = ExportQueue("traces", sender.send, settings.traces.queue, TRACE_EXPORT_INTERVAL)
    return TraceCheck(settings.traces, metrics, outbox, sender.close)


def create_access_log_check(settings: GatewaySettings, metrics: GatewayMetrics) -> AccessLogCheck | None:
    """None without the setting. Raises ResourceError where the file cannot be written."""
    if settings.access_log is None:
        return None
    lines = AccessLogFile(settings.access_log)
    return AccessLogCheck(
        metrics,
        "access_log",
        ExportQueue("access log", lines.write, MAX_QUEUED_LOG_LINES, LOG_FLUSH_INTERVAL),
        lines.close,
    )
