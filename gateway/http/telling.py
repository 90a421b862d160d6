"""What hears of every end to tell it elsewhere: traces and the access log. Without their settings there is neither."""

from __future__ import annotations

from collections.abc import Callable
from random import random
from time import monotonic, perf_counter, time

from starlette.types import Scope

from llmops.distribution import missing_extra
from llmops.gateway.http.context import RequestContext
from llmops.gateway.http.door import Check
from llmops.gateway.messages import Outcome
from llmops.gateway.observability import names
from llmops.gateway.observability.access_log import Lines
from llmops.gateway.observability.finished import Finished, has_failed
from llmops.gateway.observability.metrics import Metrics
from llmops.gateway.observability.outbox import Outbox
from llmops.gateway.observability.trace_context import Trace, parent_of
from llmops.gateway.settings import GatewaySettings, TraceSettings

# seconds: what comes within is delivered together; a receiver may take; and what is left gets when the gateway ends
TRACES_EVERY, LINES_EVERY, EXPORT, LAST = 1.0, 0.2, 10.0, 2.0
# that may wait to be written
LINES_ROOM = 16_384
# what probes and scrapers ask for all the time
_QUIET = frozenset({"/", "/health", "/health/live", "/health/ready", "/metrics"})


class Teller(Check):
    """One that tells of ends through an outbox, from `start` to `close`."""

    def __init__(self, metrics: Metrics, signal: str, outbox: Outbox[Finished], stop: Callable[[], None]) -> None:
        """`stop` ends what `outbox` delivers with."""
        self._outbox, self._stop = outbox, stop
        told = metrics.numbers(names.TOLD)
        told.labels(signal, "sent").read = lambda: outbox.delivered
        told.labels(signal, "dropped").read = lambda: outbox.dropped

    def start(self) -> None:
        self._outbox.start()

    def close(self) -> None:
        """Blocks for as long as LAST."""
        self._outbox.close(LAST)
        self._stop()


class Rate:
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


class Tracing(Teller):
    """Traces what was chosen when it came (by its caller, or by chance), and all that failed, was slow or went on
    elsewhere. Of the ones and of the others so many per second: neither clients nor an outage can make it more."""

    def __init__(
        self, settings: TraceSettings, metrics: Metrics, outbox: Outbox[Finished], stop: Callable[[], None]
    ) -> None:
        super().__init__(metrics, "trace", outbox, stop)
        self._ratio = settings.ratio
        self._chosen, self._remarkable = Rate(settings.per_second), Rate(settings.per_second)

    async def before(self, scope: Scope, context: RequestContext) -> None:
        if scope["method"] != "POST":
            return
        parent = parent_of(scope["headers"])
        trace = context.trace = Trace(parent)
        if (trace.sampled if parent else random() < self._ratio) and self._chosen.take():
            trace.choose()

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        trace = context.trace
        if trace is None:
            return
        if not trace.chosen:
            if not (_remarkable(context, outcome) and self._remarkable.take()):
                return
            trace.choose()
        self._outbox.put(finished(context, outcome))

    def passed(self, name: str) -> Check:
        """To be put behind the checks of that name."""
        return _Passed(name)


class _Passed(Check):
    def __init__(self, name: str) -> None:
        self._name = name

    async def before(self, scope: Scope, context: RequestContext) -> None:
        if context.trace is not None:
            context.trace.passed(self._name)


class AccessLog(Teller):
    """A line for every request but those of probes and scrapers."""

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        if context.route not in _QUIET:
            self._outbox.put(finished(context, outcome))


def finished(context: RequestContext, outcome: Outcome) -> Finished:
    """What is told of a request that ends now."""
    return Finished(
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


def _remarkable(context: RequestContext, outcome: Outcome) -> bool:
    meter = context.meter
    slow = meter is not None and meter.outcome in ("late", "slow")
    return slow or bool(context.moves) or has_failed(outcome)


def tracing_of(settings: GatewaySettings, metrics: Metrics) -> Tracing | None:
    """None without the setting. Raises MissingDependencyError where OpenTelemetry is not installed."""
    if settings.traces is None:
        return None
    try:
        from llmops.gateway.observability.spans import SpanSender
    except ImportError as error:
        raise missing_extra("The setting `traces` needs OpenTelemetry, which is not installed", "otel") from error
    sender = SpanSender(settings.traces.endpoint, EXPORT)
    outbox = Outbox("traces", sender.send, settings.traces.queue, TRACES_EVERY)
    return Tracing(settings.traces, metrics, outbox, sender.close)


def access_log_of(settings: GatewaySettings, metrics: Metrics) -> AccessLog | None:
    """None without the setting. Raises ResourceError where the file cannot be written."""
    if settings.access_log is None:
        return None
    lines = Lines(settings.access_log)
    return AccessLog(metrics, "access_log", Outbox("access log", lines.write, LINES_ROOM, LINES_EVERY), lines.close)
