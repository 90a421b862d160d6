"""POST /v1/responses; GET, DELETE, cancel and input_items of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llmops.gateway.api.generation_response import DeferredEventSource, json_response, respond_with_generation
from llmops.gateway.api.ignored_fields import report_dropped_tools, report_ignored_fields
from llmops.gateway.conversations.chat_translation import to_chat_request, translate_error_fields
from llmops.gateway.conversations.event_replay import (
    FLUSH_BYTES,
    PolledEventStream,
    ReplayEventStream,
    encode_events,
    events_after,
)
from llmops.gateway.conversations.items import Item, parse_input_items
from llmops.gateway.conversations.response_builder import ResponseBuilder, new_response
from llmops.gateway.conversations.response_run import REPORT_INTERVAL, ResponseRun, RunningResponses
from llmops.gateway.conversations.response_store import ResponseRecord, encode_json, ensure_item_id
from llmops.gateway.conversations.response_tools import OfferedTools, offered_tools
from llmops.gateway.conversations.stored_context import StoredContext
from llmops.gateway.errors import ApiError, InvalidRequestError, NotFoundError, UnsupportedError
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.chat_generation import start_chat, validate_chat
from llmops.gateway.generation.prompt_limits import characters
from llmops.gateway.http.client_disconnect import DisconnectWatcher
from llmops.gateway.http.request_body import validate_body
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.http.sse import EventSource, EventStreamResponse
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.gateway.schemas.responses_request import ResponsesRequest

if TYPE_CHECKING:
    from llmops.gateway.conversations.conversation_store import ConversationStore
    from llmops.gateway.conversations.conversation_turn import ResponseTurn

RESPONSES_IGNORED_FIELDS = frozenset(
    {
        "client_metadata",
        "include",
        "max_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "reasoning.summary",
        "text.verbosity",
    }
)

# Seconds without a report after which the gateway that generated a response counts as gone.
LOST_RUN_TIMEOUT = 5 * REPORT_INTERVAL
# Seconds that a cancellation waits for another gateway, and between two looks whether it has stopped.
CANCEL_PATIENCE, CANCEL_INTERVAL = 3 * REPORT_INTERVAL, 0.25
# A reader of events has the response encoded, parsed, and encoded again for the event that is being sent.
_COPIES_PER_READER = 3
# A character of a body is at most six of the JSON that is stored of it (\uXXXX).
_MAX_JSON_EXPANSION = 6


class ResponsesEndpoints:
    """The endpoints; `create` makes a response, the others are about one that is stored or running."""

    def __init__(
        self,
        service: AppState,
        running: RunningResponses,
        conversations: Callable[[], Awaitable[ConversationStore]],
        may_store: Callable[[str], bool],
    ) -> None:
        """Create them. `conversations` opens the store of conversations, `may_store` is asked about a tenant."""
        self._service, self._running, self._store = service, running, running.store
        self._conversations, self._may_store = conversations, may_store
        self._background: set[asyncio.Task] = set()

    async def create(self, request: Request) -> Response:
        context = context_of(request)
        owner = context.caller.owner
        body = await self._service.intake.load(ResponsesRequest, request)
        model = self._service.models.get(body.model, context.caller)
        own = [ensure_item_id(item, "input") for item in parse_input_items(body.input)]
        if body.previous_response_id and self._running.find(body.previous_response_id, owner):
            raise InvalidRequestError(
                f"Previous response with id '{body.previous_response_id}' is still in progress.",
                param="previous_response_id",
            )
        intake = self._service.intake
        stored = StoredContext(self._store, owner, intake.limits, lambda size: intake.hold(size, context))
        tools = offered_tools(body.tools or [])
        turn = await self._turn(body, context)
        before = turn.items if turn is not None else []
        items = [*before, *await stored.items(own, body.previous_response_id)]
        chat = self._as_chat(body, items, tools, model, context)
        # earlier messages are not part of this body, but of its work
        context.size = max(context.size, characters(chat.messages))
        builder = ResponseBuilder(new_response(body, model), tools.origins)
        if turn is not None:
            builder.response["conversation"] = {"id": _conversation_of(body)}
        running = self._running if self._is_to_be_stored(body, own, builder, context) else None
        whole = not (body.stream or body.background)

        async def start() -> Answer:
            try:
                return await start_chat(self._service, chat, model, builder.id, context, whole=whole)
            except ApiError as error:
                translate_error_fields(error)
                raise

        def run(answer: Answer) -> ResponseRun:
            return ResponseRun(answer, builder, own, owner, running, turn.add if turn is not None else None)

        async def announced(answer: Answer) -> ResponseRun:
            begun = run(answer).begin()
            try:
                await begun.announce()
            except ApiError:
                begun.discard()
                begun.close()
                raise
            return begun

        def failed(error: ApiError) -> bytes:
            return encode_events([*builder.start(), *builder.fail(error)])

        if body.background and body.stream:
            watch = DisconnectWatcher(request.receive)

            async def follow() -> EventSource:
                begun = await announced(await start())
                source = begun.follow()
                watch.tell(source.cancel)
                self._in_background(begun, context)
                return source

            return self._stream(DeferredEventSource(follow, failed), watch)
        if body.background:
            begun = await announced(await start())
            self._in_background(begun, context)
            return json_response(begun.entry().response)
        return await respond_with_generation(
            request,
            start,
            self._service.timeouts,
            events=run if body.stream else None,
            collect=lambda answer: run(answer).collect(),
            failed=failed,
        )

    async def get(self, request: Request) -> Response:
        response_id, owner = _named(request)
        run = self._running.find(response_id, owner)
        if run is not None:
            after = _asked_stream(request)
            return json_response(run.entry().response) if after is None else self._reading(request, run.follow(after))
        row = await self._find(response_id, owner)
        self._hold(request, row)
        after = _asked_stream(request)
        if after is None:
            return _json_in_pieces(row.response)
        entry = row.decoded()
        if entry.running:
            return self._reading(request, PolledEventStream(self._store, entry, after))
        return self._reading(request, ReplayEventStream(events_after(after, entry.response, entry.cuts)))

    async def delete(self, request: Request) -> Response:
        response_id, owner = _named(request)
        run = self._running.find(response_id, owner)
        if run is not None:
            run.discard()
        if not await self._store.delete(response_id, owner) and run is None:
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        response_id, owner = _named(request)
        run = self._running.find(response_id, owner)
        if run is not None:
            run.cancel()
            return json_response(run.entry().response)
        row = await self._find(response_id, owner)
        if not row.running:
            status = row.decoded().response["status"]
            raise InvalidRequestError(f"Only a response in progress can be cancelled; this one is {status}.")
        await self._store.request_cancellation(response_id, owner)
        deadline = asyncio.get_running_loop().time() + CANCEL_PATIENCE
        while row.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(CANCEL_INTERVAL)
            row = await self._find(response_id, owner)
        return Response(row.response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        response_id, owner = _named(request)
        run = self._running.find(response_id, owner)
        if run is not None:
            items = run.entry().items[::-1]
        else:
            row = await self._find(response_id, owner)
            self._hold(request, row)
            items = row.decoded().items[::-1]
        ids = [item["id"] for item in items] or [None]
        page = {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return json_response(page)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._running.close()

    # -- one that is stored ----------------------------------------------------------------------------------------

    def _hold(self, request: Request, row: ResponseRecord) -> None:
        """Count what a reader makes the gateway hold until the last byte is sent. Raises UnavailableError."""
        self._service.intake.hold(_COPIES_PER_READER * row.size, context_of(request))

    async def _find(self, response_id: str, owner: str) -> ResponseRecord:
        """Return the stored response, as failed if the gateway that generated it is gone. Raises NotFoundError."""
        row = await self._store.find(response_id, owner)
        if row is None:
            raise _not_found(response_id)
        if not row.running or row.age < LOST_RUN_TIMEOUT:
            return row
        entry = row.decoded()
        message = "The gateway that generated this response is gone."
        entry.response.update(status="failed", error={"code": "server_error", "message": message})
        entry.running = False
        failed = entry.to_row()
        await self._store.put(failed, new=False)
        return failed

    # -- creating one ----------------------------------------------------------------------------------------------

    async def _turn(self, body: ResponsesRequest, context: RequestContext) -> ResponseTurn | None:
        """Return the conversation that the request names."""
        conversation_id = _conversation_of(body)
        if conversation_id is None:
            return None
        if body.previous_response_id is not None:
            raise InvalidRequestError(
                "A request has a conversation or a previous_response_id; leave one of them out.", param="conversation"
            )
        # SQLAlchemy is an extra, and a gateway without conversations does not load it
        from llmops.gateway.conversations.conversation_turn import ResponseTurn

        store = await self._conversations()
        try:
            conversation = await store.read(context.caller, conversation_id)
        except NotFoundError as error:
            error.param = "conversation"
            raise
        turn = ResponseTurn(store, context.caller, conversation)
        self._service.intake.hold(turn.size, context)
        return turn

    def _is_to_be_stored(
        self, body: ResponsesRequest, own: list[Item], builder: ResponseBuilder, context: RequestContext
    ) -> bool:
        """Return whether the response is stored, and say so in the response.

        Raises InvalidRequestError if the client asks for a response to be stored that cannot be.
        """
        limits, response = self._store.limits, builder.response
        if body.store is False:
            problem = "The request says store: false"
        elif not self._may_store(context.caller.tenant_id):
            problem = "Nothing of this tenant is stored"
        elif not limits.entries:
            problem = "This gateway stores no responses"
        else:
            # a body that is short enough needs no look at what would be stored of it
            size = context.size * _MAX_JSON_EXPANSION
            if size > limits.item_bytes:
                size = len(encode_json(own)) + len(encode_json(response))
            if size <= limits.item_bytes:
                return True
            problem = f"The request has {size:,} characters, and a stored response may have {limits.item_bytes:,}"
        if body.store or body.background:
            raise InvalidRequestError(f"{problem}; leave out store and background.", param="store")
        response["store"] = False
        return False

    def _as_chat(
        self,
        body: ResponsesRequest,
        items: list[Item],
        tools: OfferedTools,
        model: GenerativeModel,
        context: RequestContext,
    ) -> ChatRequest:
        try:
            chat = validate_body(ChatRequest, to_chat_request(body, items, tools))
            validate_chat(chat, model, self._service.limits)
        except ApiError as error:
            translate_error_fields(error)
            raise
        if (chat.n or 1) > 1:
            raise UnsupportedError("A response has one answer; leave out n.", param="n")
        report_ignored_fields(context, self._service, body, RESPONSES_IGNORED_FIELDS, extra=chat)
        report_dropped_tools(context, tools.left_out)
        return chat

    def _in_background(self, run: ResponseRun, context: RequestContext) -> None:
        """Generate the response whatever its client does."""
        context.later = task = asyncio.create_task(run.in_background(), name=f"response-{run.id}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _reading(self, request: Request, source: ReplayEventStream) -> Response:
        """Stream `source` to a reader, who ends nothing else by leaving."""
        watch = DisconnectWatcher(request.receive)
        watch.tell(source.cancel)
        return self._stream(source, watch)

    def _stream(self, source: EventSource, watch: DisconnectWatcher) -> Response:
        timeouts = self._service.timeouts
        return EventStreamResponse(source, watch, patience=timeouts.client, keepalive=timeouts.keepalive)


def _conversation_of(body: ResponsesRequest) -> str | None:
    found = body.conversation["id"] if isinstance(body.conversation, dict) and "id" in body.conversation else None
    named = found if isinstance(body.conversation, dict) else body.conversation
    if body.conversation is not None and not isinstance(named, str):
        raise InvalidRequestError("conversation must be an id, or an object with one.", param="conversation")
    return named


def _asked_stream(request: Request) -> int | None:
    """The event after which a stream is to start, -1 for all of it; None where no stream is asked for."""
    query = request.query_params
    stream, after = query.get("stream", "false").lower(), query.get("starting_after")
    if stream not in ("true", "false", "1", "0"):
        raise InvalidRequestError("stream must be true or false.", param="stream")
    if stream in ("false", "0"):
        if after is not None:
            raise InvalidRequestError("starting_after needs stream to be true; set it.", param="starting_after")
        return None
    if after is None:
        return -1
    if not after.isdecimal() or len(after) > 9:
        raise InvalidRequestError("starting_after must be the sequence number of an event.", param="starting_after")
    return int(after)


def _json_in_pieces(text: str) -> Response:
    """Answer with JSON that is encoded as the client reads it."""
    pieces = (text[start : start + FLUSH_BYTES].encode() for start in range(0, len(text), FLUSH_BYTES))
    headers = {"content-length": str(len(text))}  # ASCII: everything else is escaped
    return StreamingResponse(_each(pieces), media_type="application/json", headers=headers)


async def _each(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def _named(request: Request) -> tuple[str, str]:
    """Return the id of the response that is asked for, and who asks."""
    return request.path_params["response_id"], context_of(request).caller.owner


def _not_found(response_id: str) -> NotFoundError:
    return NotFoundError(f"Response with id '{response_id}' not found.")
