"""Responses of endpoints that generate text, and encoding of JSON.

An endpoint starts an answer, then streams the answer or collects the whole of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.errors import ApiError, InvalidRequestError
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.answer_events import record_timings
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.choice import Choice, json_logprob
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.http.sse import (
    KEEPALIVE_COMMENT,
    DisconnectWatcher,
    EventSource,
    EventStreamResponse,
    openai_error_event,
)
from llmops.gateway.interfaces import Outcome, Usage
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.settings import Timeouts

#: Number of pieces of JSON that are encoded before other requests run again. Encoding this many
#: takes a few milliseconds of the event loop.
JSON_PARTS_PER_TURN = 4096
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


async def respond_with_generation(
    request: Request,
    start: Callable[[], Awaitable[Answer]],
    timeouts: Timeouts,
    *,
    events: Callable[[Answer], EventSource] | None,
    collect: Callable[[Answer], Awaitable[dict[str, Any]]],
    error_event: Callable[[ApiError], bytes] = openai_error_event,
    keepalive_event: bytes = KEEPALIVE_COMMENT,
) -> Response:
    """Start an answer and respond with it. The answer is cancelled when the client disconnects.

    Args:
        request: The request, whose body has been read.
        start: Submits the request to an engine.
        timeouts: The time limits for a client that reads a stream.
        events: Creates the event stream of an answer. None to collect the answer.
        collect: Reads the answer to its end and returns the JSON body.
        error_event: Encodes an error of `start` that occurs after a stream's first keep-alive.
        keepalive_event: The event that is sent while a stream has nothing else to send.
    """
    watcher = DisconnectWatcher(request.receive)
    if events is not None:

        async def open_source() -> EventSource:
            answer = await start()
            watcher.notify(answer.cancel)
            return events(answer)

        return EventStreamResponse(
            open_source, watcher, timeouts, keepalive_event=keepalive_event, error_event=error_event
        )
    try:
        answer = await start()
        watcher.notify(answer.cancel)
        with closing(answer), record_timings(answer, context_of(request)):
            await answer.start()
            try:
                body = await collect(answer)
            except ApiError:
                raise
            except BaseException as error:
                answer.abandon(error)
                raise
            return json_response(body) if answer.choices[0].logprobs is None else await chunked_json_response(body)
    finally:
        watcher.close()


def json_response(body: dict[str, Any]) -> Response:
    """Return `body` as a JSON response."""
    return Response(json_bytes(body), media_type="application/json")


async def chunked_json_response(body: dict[str, Any]) -> Response:
    """Return `body` as a JSON response, and let other requests run while it is encoded.

    Encoding 64,000 log-probabilities at once would block the event loop for a second.
    """
    pieces, parts = _ENCODER.iterencode(body), []
    while part := "".join(islice(pieces, JSON_PARTS_PER_TURN)):
        parts.append(part)
        await asyncio.sleep(0)
    return Response("".join(parts).encode("utf-8", "replace"), media_type="application/json")


def page_limit(query: Mapping[str, str], default: int, maximum: int) -> int:
    """Return the number of entries on a page that the query parameter `limit` requests.

    Args:
        query: The query parameters.
        default: The number of entries without `limit`.
        maximum: The largest permitted `limit`.

    Raises:
        InvalidRequestError: `limit` is not a number from 1 to `maximum`.
    """
    text = query.get("limit", str(default))
    if text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= maximum:
        return int(text)
    raise InvalidRequestError(f"limit must be a number from 1 to {maximum}.", param="limit", code="invalid_value")


def json_bytes(body: Any) -> bytes:
    """Return `body` as compact JSON in UTF-8."""
    return _ENCODER.encode(body).encode("utf-8", "replace")


@contextmanager
def translated_errors(translate: Callable[[ApiError], None]) -> Iterator[None]:
    """Translate the field names in the block's errors to another API's names, with `translate`."""
    try:
        yield
    except ApiError as error:
        translate(error)
        raise


@contextmanager
def record_prompt_usage(context: RequestContext, model: str, tokens: int) -> Iterator[Usage]:
    """Record the usage of a request that reads `tokens` prompt tokens and generates no tokens.

    Requests for embeddings and reranking are such requests.
    """
    usage, context.model = Usage(tokens), model
    if context.usage_recorder is not None:
        context.usage_recorder.begin(model, context.request_id, tokens)
    yield usage
    context.usage = usage
    if context.usage_recorder is not None:
        context.usage_recorder.end(Outcome(200, "", usage))


async def render_prompt_logprobs(
    choices: Sequence[Choice], count: int, state: AppState, model: GenerativeModel, context: RequestContext
) -> list[dict[str, Any] | None] | None:
    """Return an entry for each prompt token, rendered in a text thread if there are many.

    Args:
        choices: The choices of one prompt. The first that received tokens has the entries.
        count: The number of alternatives per token that the request asks for. A rank beyond this
            number is not known and becomes None.
        state: The gateway's shared state.
        model: The model.
        context: The request's context.
    """
    places = next((choice.prompt_logprobs for choice in choices if choice.prompt_logprobs is not None), None)
    if places is None:
        return None

    def entry(token: int, value: float, rank: int) -> dict[str, Any]:
        text = model.tokenizer.detokenizers.token_bytes(token).decode("utf-8", "replace")
        return {"logprob": json_logprob(value), "rank": rank if rank <= count else None, "decoded_token": text}

    def render() -> list[dict[str, Any] | None]:
        # The first token has no log-probability, because no token precedes it.
        found: list[dict[str, Any] | None] = [None]
        for place in places:
            found.append({str(token): entry(token, value, rank) for rank, (token, value) in enumerate(place, 1)})
        return found

    return await state.text_threads.run(render, 4 * sum(map(len, places)), context.caller.share)
