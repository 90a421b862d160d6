"""What traces and the access log cost a request: `python -m llmops.perf.lab.benchmarks.telling`.

The gateway's door in front of nothing, without HTTP around it; CPU is this thread's own, with and without by turns.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from llmops.gateway.http.exporters import AccessLogCheck, TraceCheck, finished_request
from llmops.gateway.http.middleware import Check, RequestMiddleware
from llmops.gateway.http.request_context import context_from_scope
from llmops.gateway.interfaces import Outcome, Usage
from llmops.gateway.settings import TraceSettings
from llmops.gateway.telemetry.access_log import format_line
from llmops.gateway.telemetry.export_queue import ExportQueue
from llmops.gateway.telemetry.metrics import GatewayMetrics
from llmops.gateway.telemetry.otlp_exporter import OtlpSpanExporter
from llmops.gateway.telemetry.request_timeline import FinishedRequest
from llmops.perf.lab.harness.figures import Section

ROUNDS, REQUESTS, TOLD = 25, 1_000, 300
# as a client of OpenAI's library sends them
HEADERS = [
    (b"host", b"127.0.0.1:9000"),
    (b"accept-encoding", b"gzip, deflate, br, zstd"),
    (b"connection", b"keep-alive"),
    (b"accept", b"application/json"),
    (b"content-type", b"application/json"),
    (b"user-agent", b"OpenAI/Python 3.52.0"),
    *((b"x-stainless-" + name, b"value") for name in (b"lang", b"os", b"arch", b"runtime", b"async", b"retry-count")),
    (b"authorization", b"Bearer sk-llmops-0123456789"),
    (b"content-length", b"148"),
]
PARENT = (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")


def measure() -> Section:
    """All figures of this script."""
    text = "The door in front of nothing, 14 headers; with and without by turns, the best round of each."
    section = Section("Telling", "python -m llmops.perf.lab.benchmarks.telling", text)
    with section:
        asyncio.run(_measure(section))
    return section


async def _measure(section: Section) -> None:
    tracing, log = _tracing(0.0), AccessLogCheck(GatewayMetrics(), "access_log", _outbox(), _nothing)
    asked = [tracing, tracing.passed("auth"), tracing.passed("rate_limit")]
    section.add("traces on, not told of", await _dearer([tracing]), "µs/request", 5)
    section.add("the same with keys and limits", await _dearer(asked), "µs/request", 5)
    section.add("the same and a traceparent", await _dearer(asked, PARENT), "µs/request", 5)
    section.add("access log", await _dearer([log]), "µs/request")
    every = _tracing(1.0)
    chosen = [every, every.passed("auth"), every.passed("rate_limit")]
    section.add("told of, on the event loop", await _dearer(chosen), "µs/request", 10)
    told = await _told(chosen)
    sender = OtlpSpanExporter("http://127.0.0.1:1", 1.0)
    section.add(
        "told of, its spans (another thread)",
        _each(told, lambda one: sender.message([one]).SerializeToString()),
        "µs/request",
        300,
    )
    section.add("a line of the access log (another thread)", _each(told, format_line), "µs/request")


def _tracing(ratio: float) -> TraceCheck:
    settings = TraceSettings(endpoint="http://127.0.0.1:1", ratio=ratio, per_second=1_000_000_000)
    return TraceCheck(settings, GatewayMetrics(), _outbox(), _nothing)


def _outbox() -> ExportQueue[FinishedRequest]:
    """Has room for all, and is never started."""
    return ExportQueue("nobody", lambda batch: None, 10**9, 1.0)


def _nothing() -> None:
    return


async def _dearer(checks: Sequence[Check], *headers: tuple[bytes, bytes]) -> float:
    """Microseconds that a request costs more with `checks`."""
    without = beside = math.inf
    for _ in range(ROUNDS):
        without = min(without, await _spent([], *headers))
        beside = min(beside, await _spent(checks, *headers))
    return 1e6 * (beside - without) / REQUESTS


async def _spent(checks: Sequence[Check], *headers: tuple[bytes, bytes]) -> float:
    door = RequestMiddleware(_answer, lambda scope: "/v1/chat/completions", checks)
    began = time.thread_time()
    for _ in range(REQUESTS):
        await door(_scope(headers), _never, _drop)
    return time.thread_time() - began


async def _told(checks: Sequence[Check]) -> list[FinishedRequest]:
    """Answers as they are told, each with the stages and tokens of one."""
    told = []

    class Keep(Check):
        def after(self, context: Any, outcome: Outcome) -> None:
            told.append(finished_request(context, outcome))

    door = RequestMiddleware(_answer, lambda scope: "/v1/chat/completions", [*checks, Keep()])
    for _ in range(TOLD):
        await door(_scope(()), _never, _drop)
    return told


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    context = context_from_scope(scope)
    for stage in ("parse", "queue", "template", "tokenise", "submit"):
        context.mark(stage)
    meter = context.meter = METRICS.meter("smollm2", context.started)
    context.model, context.usage, context.finish = "smollm2", Usage(64, 2, 0, 32), "stop"
    meter.submitted(64, 1)
    meter.tokens(1)
    meter.tokens(1)
    meter.end(context.usage, "stop")
    await send({"type": "http.response.start", "status": 200, "headers": []})


METRICS = GatewayMetrics()


def _scope(headers: Sequence[tuple[bytes, bytes]]) -> Scope:
    return {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [*HEADERS, *headers]}


async def _never() -> Message:
    raise AssertionError("nothing is read here")


async def _drop(message: Message) -> None:
    return


def _each(told: Sequence[FinishedRequest], work: Callable[[FinishedRequest], Any]) -> float:
    """Microseconds."""
    found = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for one in told:
            work(one)
        found.append(time.thread_time() - began)
    return 1e6 * min(found) / len(told)


if __name__ == "__main__":
    measure()
