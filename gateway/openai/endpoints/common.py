"""The frame that every generating endpoint shares: prepare, start, then stream or collect."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.errors import ApiError, CancelledStreamError, InternalError
from llmops.gateway.http.context import RequestContext, context_of
from llmops.gateway.http.events import EventSource, EventStream
from llmops.gateway.http.outlet import Outlet
from llmops.gateway.http.watch import ClientWatch
from llmops.gateway.logs import current_request
from llmops.gateway.messages import TokenBatch
from llmops.gateway.observability.metrics import Metrics
from llmops.gateway.openai.answer import Advance, Answer
from llmops.gateway.openai.chunks import error_event
from llmops.gateway.openai.types.common import Wire

log = logging.getLogger(__name__)


class AnswerEvents(EventSource):
    """An Answer as server-sent events; subclasses say how an advance and the end look on the wire."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._over = False
        self._late: Exception | None = None

    async def start(self, context: RequestContext) -> None:
        with _timed(self._answer, context):
            await self._answer.start()

    def late(self, error: Exception) -> None:
        self._late = error

    async def next(self) -> bytes | None:
        if self._over:
            return None
        try:
            if self._late is not None:
                raise self._late
            advance = await self._answer.next()
            if advance is not None:
                return self.render(advance)
        except CancelledStreamError:
            self._over = True
            return None
        except ApiError as error:
            self._over = True
            return self.failed(error)
        except Exception:
            # the 200 is out: a bug can only be told inside the stream
            log.exception("request %s: the stream failed", current_request.get())
            self._over = True
            return self.failed(InternalError("The gateway failed in the middle of the stream."))
        self._over = True
        return self.end()

    def attach(self, outlet: Outlet) -> None:
        """Tokens become bytes in `outlet` by one plain call, without waking this stream's coroutine."""

        def sink(batch: TokenBatch) -> bool:
            if outlet.blocked:
                return False
            data = self.render(self._answer.take(batch))
            if data:
                outlet.write(data)
            return True

        self._answer.attach(sink)

    @abstractmethod
    def render(self, advance: Advance) -> bytes: ...

    @abstractmethod
    def end(self) -> bytes: ...

    def failed(self, error: ApiError) -> bytes:
        return error_event(error)

    def cancel(self) -> None:
        self._answer.cancel()

    def close(self) -> None:
        self._answer.close()


async def respond(
    request: Request,
    start: Callable[[], Awaitable[Answer]],
    *,
    events: Callable[[Answer], EventSource] | None,
    collect: Callable[[Answer], Awaitable[dict[str, Any]]],
) -> Response:
    """Start the answer, then stream it (`events`) or collect it. The client is watched from here on."""
    context = context_of(request)
    watch = ClientWatch(request.receive)
    streaming = False
    try:
        answer = await start()
        watch.tell(answer.cancel)
        if events is None:
            return json_response(await _collected(answer, collect, context))
        timeouts = answer.timeouts
        stream = EventStream(events(answer), watch, patience=timeouts.client, keepalive=timeouts.keepalive)
        streaming = True
        return stream
    finally:
        if not streaming:
            watch.close()


@contextmanager
def _timed(answer: Answer, context: RequestContext) -> Iterator[None]:
    """Whatever happens, `context` knows what of the time was not the gateway's."""
    try:
        yield
    finally:
        context.waited, context.detokenised = answer.waited, answer.detokenised


async def _collected(
    answer: Answer, collect: Callable[[Answer], Awaitable[dict[str, Any]]], context: RequestContext
) -> dict[str, Any]:
    try:
        with _timed(answer, context):
            await answer.start()
            return await collect(answer)
    finally:
        answer.close()


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(data, status, media_type="application/json")


def note_ignored(
    context: RequestContext,
    metrics: Metrics,
    body: Wire,
    known: frozenset[str] = frozenset(),
    *,
    extra: Wire | None = None,
) -> None:
    """Tell the client, and count, what was set but changes nothing.

    `known` fields may be dotted: `text.verbosity`. Fields that nobody knows are those left over in `extra`, or `body`.
    """
    given = body.model_fields_set
    found = sorted(name for name in known if name.partition(".")[0] in given and _is_set(body, name))
    unknown = sorted(name for name, value in ((extra or body).model_extra or {}).items() if value is not None)
    context.ignored = found + [_printable(name) for name in unknown[:16]]
    for name in found:
        metrics.ignored.labels(name).inc()
    if unknown:
        # a client must not be able to make labels
        metrics.ignored.labels("unknown").inc(len(unknown))


def _is_set(body: Wire, name: str) -> bool:
    value: Any = body
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if value is None:
            return False
    return True


def _printable(name: str) -> str:
    return name[:64].encode("ascii", "backslashreplace").decode() if name.isprintable() else "?"
