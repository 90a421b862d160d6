"""The frame that every generating endpoint shares: prepare, start, then stream or collect."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.errors import ApiError, InternalError, log_detail
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.answer_events import record_timings
from llmops.gateway.http.chunked_writer import ChunkedWriter
from llmops.gateway.http.client_disconnect import DisconnectWatcher
from llmops.gateway.http.error_handlers import openai_error_event
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.http.sse import KEEPALIVE_COMMENT, EventSource, EventStreamResponse
from llmops.gateway.interfaces import Outcome, Usage
from llmops.gateway.logging_setup import current_request
from llmops.gateway.settings import Timeouts

log = logging.getLogger(__name__)

# pieces of JSON that are made in one go, a few milliseconds
JSON_PARTS_PER_TURN = 4096
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class DeferredEventSource(EventSource):
    """The events of an answer that is yet to be started: it may wait long for its turn, and the stream's first sign of
    life must not wait with it."""

    def __init__(self, begin: Callable[[], Awaitable[EventSource]], failed: Callable[[ApiError], bytes]) -> None:
        """`failed` makes the events of what went wrong before there was an answer."""
        self._begin, self._failed = begin, failed
        self._source: EventSource | None = None
        self._late: bytes | None = None

    async def start(self, context: RequestContext) -> None:
        try:
            self._source = await self._begin()
        except Exception as error:
            context.finish = error.finish if isinstance(error, ApiError) else "error"
            raise
        await self._source.start(context)

    def late(self, error: Exception) -> None:
        if self._source is not None:
            self._source.late(error)
            return
        if not isinstance(error, ApiError):
            log.error("request %s: the stream failed", current_request.get(), exc_info=error)
            error = InternalError("The gateway failed before the stream began.")
        log_detail(error)
        self._late = self._failed(error)

    async def next(self) -> bytes | None:
        if self._source is not None:
            return await self._source.next()
        late, self._late = self._late, None
        return late

    def attach(self, writer: ChunkedWriter) -> None:
        if self._source is not None:
            self._source.attach(writer)

    def cancel(self) -> None:
        if self._source is not None:
            self._source.cancel()

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


async def respond_with_generation(
    request: Request,
    start: Callable[[], Awaitable[Answer]],
    timeouts: Timeouts,
    *,
    events: Callable[[Answer], EventSource] | None,
    collect: Callable[[Answer], Awaitable[dict[str, Any]]],
    failed: Callable[[ApiError], bytes] = openai_error_event,
    sign: bytes = KEEPALIVE_COMMENT,
) -> Response:
    """Start the answer, then stream it (`events`) or collect it. The client is watched from here on.

    `failed` makes the events of an error that comes after the stream's first `sign` of life and before its answer.
    """
    watch = DisconnectWatcher(request.receive)
    if events is not None:

        async def begin() -> EventSource:
            answer = await start()
            watch.tell(answer.cancel)
            return events(answer)

        source = DeferredEventSource(begin, failed)
        return EventStreamResponse(source, watch, patience=timeouts.client, keepalive=timeouts.keepalive, sign=sign)
    try:
        answer = await start()
        watch.tell(answer.cancel)
        with closing(answer), record_timings(answer, context_of(request)):
            await answer.start()
            body = await collect(answer)
            return json_response(body) if answer.choices[0].logprobs is None else await chunked_json_response(body)
    finally:
        watch.close()


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    return Response(json_bytes(body), status, media_type="application/json")


async def chunked_json_response(body: dict[str, Any]) -> Response:
    """Like `json_response`, with turns for others: 64,000 log-probabilities would hold the event loop for a second."""
    pieces, parts = _ENCODER.iterencode(body), []
    while part := "".join(islice(pieces, JSON_PARTS_PER_TURN)):
        parts.append(part)
        await asyncio.sleep(0)
    return Response("".join(parts).encode("utf-8", "replace"), media_type="application/json")


def json_bytes(body: Any) -> bytes:
    return _ENCODER.encode(body).encode("utf-8", "replace")


@contextmanager
def record_prompt_usage(context: RequestContext, model: str, tokens: int) -> Iterator[Usage]:
    """A model's work on `tokens` that generates none: what was used is on the bill as soon as it is done."""
    used, context.model = Usage(tokens), model
    if context.tally is not None:
        context.tally.begin(model, context.request_id, tokens)
    yield used
    context.usage = used
    if context.tally is not None:
        context.tally.end(Outcome(200, "", used))
