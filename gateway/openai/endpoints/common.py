"""The frame that every generating endpoint shares: prepare, start, then stream or collect."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.errors import ApiError, CancelledStreamError, InternalError
from llmops.gateway.http.context import context_of
from llmops.gateway.http.events import EventSource, EventStream
from llmops.gateway.http.watch import ClientWatch
from llmops.gateway.openai.answer import Advance, Answer
from llmops.gateway.openai.chunks import error_event
from llmops.gateway.openai.types.common import SamplingFields

log = logging.getLogger(__name__)


class AnswerEvents(EventSource):
    """An Answer as server-sent events; subclasses say how an advance and the end look on the wire."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._over = False

    async def next(self) -> bytes | None:
        if self._over:
            return None
        try:
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
            log.exception("a stream failed")
            self._over = True
            return self.failed(InternalError("The gateway failed in the middle of the stream."))
        self._over = True
        return self.end()

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
        await answer.start()
        context.waited = answer.waited
        if events is not None:
            stream = EventStream(events(answer), watch, context.headers())
            streaming = True
            return stream
        try:
            body = await collect(answer)
        finally:
            answer.close()
        context.waited = answer.waited
        return json_response(body)
    finally:
        if not streaming:
            watch.close()


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(data, status, media_type="application/json")


def ignored_fields(body: SamplingFields, ignored: frozenset[str]) -> list[str]:
    """Fields that were set but change nothing: known ones, and those that nobody knows."""
    known = [name for name in sorted(ignored & body.model_fields_set) if getattr(body, name) is not None]
    unknown = [name for name, value in (body.model_extra or {}).items() if value is not None]
    return known + [_printable(name) for name in sorted(unknown)[:16]]


def _printable(name: str) -> str:
    return name[:64].encode("ascii", "backslashreplace").decode() if name.isprintable() else "?"
