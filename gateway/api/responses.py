"""The endpoints of OpenAI's Responses API.

The routes are POST /v1/responses and its input_tokens, and GET, DELETE, cancel and input_items of a
response.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llmops.background import TaskSet
from llmops.gateway.api.generation_response import (
    json_bytes,
    json_response,
    respond_with_generation,
    translated_errors,
)
from llmops.gateway.api.ignored_fields import report_dropped_tools, report_ignored_fields
from llmops.gateway.api.item_pages import ITEM_PAGE_PARAMETERS, item_page
from llmops.gateway.api.resumable_chats import ResumableChats
from llmops.gateway.conversations.answer_run import AnswerRun
from llmops.gateway.conversations.background_response import BackgroundFormat
from llmops.gateway.conversations.chat_run import SAVE_INTERVAL, ChatRun
from llmops.gateway.conversations.chat_translation import to_chat_request, translate_error_fields
from llmops.gateway.conversations.event_replay import (
    encode_events,
    encode_in_pieces,
    events_after,
    render_in_turn,
)
from llmops.gateway.conversations.items import Item, parse_input_items
from llmops.gateway.conversations.response_builder import ResponseBuilder, new_response
from llmops.gateway.conversations.response_run import ResponseRun, ResponseSaver
from llmops.gateway.conversations.response_store import ResponseRecord, ResponseStore, encode_json, ensure_item_id
from llmops.gateway.conversations.response_tools import OfferedTools, offered_tools
from llmops.gateway.conversations.stored_context import StoredContext
from llmops.gateway.errors import ApiError, InvalidRequestError, NotFoundError, UnsupportedError
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.chat_generation import ChatGeneration, validate_chat
from llmops.gateway.generation.prompt_limits import max_rendered_characters
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.request_body import validate_body
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.http.sse import (
    STREAM_HEADERS,
    DisconnectWatcher,
    EventSource,
    EventStreamResponse,
    openai_error_event,
)
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.gateway.schemas.response_schemas import DeletedResponse, InputTokenCount, ItemList, ResponseObject
from llmops.gateway.schemas.responses_request import ResponsesRequest

if TYPE_CHECKING:
    from llmops.gateway.conversations.conversation_store import ConversationStore
    from llmops.gateway.conversations.conversation_turn import ResponseTurn

#: Fields that are accepted without effect, so that clients which always send them work.
RESPONSES_IGNORED_FIELDS = frozenset(
    {
        *("client_metadata", "include", "max_tool_calls", "prompt_cache_retention", "stream_options"),
        *("reasoning.summary", "text.verbosity"),
    }
)
#: Seconds without a write after which the gateway that generates a response counts as lost. A
#: running gateway writes every `SAVE_INTERVAL`.
LOST_RUN_TIMEOUT = 5 * SAVE_INTERVAL
#: Seconds that a cancellation waits for the gateway that generates the response to stop. A gateway
#: reads cancellations every `SAVE_INTERVAL`.
CANCEL_TIMEOUT = 3 * SAVE_INTERVAL
#: Seconds between two reads of the store while a cancellation waits. Bounds the load on the store.
CANCEL_POLL_INTERVAL = 0.25
#: Number of copies of a stored response that a reader holds in memory: the stored text, the parsed
#: object, and the event that is being sent.
_COPIES_PER_READER = 3
#: Maximum number of characters of stored JSON per character of a request body: \uXXXX has six.
_MAX_JSON_EXPANSION = 6
_RUN_ID = re.compile(r"resp_[0-9a-f]{48}")


class ResponsesEndpoints:
    """The endpoints of OpenAI's Responses API."""

    def __init__(
        self,
        service: AppState,
        store: ResponseStore,
        chats: ResumableChats,
        conversations: Callable[[], Awaitable[ConversationStore]],
        may_store: Callable[[str], bool],
    ) -> None:
        """Create the endpoints.

        Args:
            service: The gateway's shared state.
            store: The store of responses.
            chats: The answers in progress, including responses in the background.
            conversations: Opens the store of conversations.
            may_store: Returns True if a tenant's responses may be stored.
        """
        self._service, self._store, self._chats = service, store, chats
        self._conversations, self._may_store = conversations, may_store
        self._tasks = TaskSet()

    def add_routes(self, app: GatewayApp) -> None:
        """Add the routes to `app`."""
        one, path = "/v1/responses/{response_id}", {"response_id": "The response's id."}
        replay: dict[str, tuple[dict[str, Any], str]] = {
            "stream": ({"type": "boolean"}, "Send the response's events again, as a stream."),
            "starting_after": (
                {"type": "integer", "minimum": 0},
                "Send only events after this sequence number. Needs stream.",
            ),
        }
        app.add_endpoint(
            "POST", "/v1/responses", self.create, "Create a response", ResponseObject, body=ResponsesRequest
        )
        app.add_endpoint(
            "POST", "/v1/responses/input_tokens", self.count_tokens, "Count a response's input tokens",
            InputTokenCount, body=ResponsesRequest,
        )  # fmt: skip
        app.add_endpoint(
            "GET",
            one,
            self.get,
            "Get a response",
            ResponseObject,
            path_parameters=path,
            query_parameters=replay,
            streams=True,
        )
        app.add_endpoint("DELETE", one, self.delete, "Delete a response", DeletedResponse, path_parameters=path)
        app.add_endpoint(
            "POST", f"{one}/cancel", self.cancel, "Cancel a response", ResponseObject, path_parameters=path
        )
        app.add_endpoint(
            "GET", f"{one}/input_items", self.input_items, "List a response's input", ItemList, path_parameters=path,
            query_parameters=ITEM_PAGE_PARAMETERS,
        )  # fmt: skip

    async def create(self, request: Request) -> Response:
        """Generate a response: whole, streamed, or in the background."""
        context = context_of(request)
        owner = context.caller.owner
        body = await self._service.intake.load(ResponsesRequest, request)
        _check_tool_size(body, context.work_bytes, self._service.limits.prompt_bytes)
        model = await self._service.find_model(body.model, context, body, overflow=True)
        own, tools = _own_items(body), offered_tools(body.tools or [])
        turn = await self._turn(body, context)
        chat = await self._as_chat(body, own, turn, tools, model, context)
        builder = ResponseBuilder(new_response(body, model, context.service_tier), tools.origins)
        if turn is not None:
            await turn.check_room(own)
            builder.response["conversation"] = {"id": body.conversation_id}
        store = self._store if self._is_to_be_stored(body, own, builder, context) else None
        saver = ResponseSaver(store, turn.add if turn is not None else None, context.caller.group)
        whole = not (body.stream or body.background)
        generation = ChatGeneration(self._service, chat, model, builder.id, context)

        async def start() -> Answer:
            with translated_errors(translate_error_fields):
                return await generation.start(whole=whole)

        def run(answer: Answer) -> ResponseRun:
            return ResponseRun(answer, builder, own, owner, saver, self._tasks)

        async def run_in_background() -> AnswerRun:
            form = BackgroundFormat(response=builder.response, items=own, origins=tools.origins)
            with translated_errors(translate_error_fields):
                return await self._chats.start_response(generation, form, saver)

        def error_event(error: ApiError) -> bytes:
            return encode_events([*builder.start(), *builder.fail(error.body()["error"])])

        if body.background and body.stream:
            return self._stream(request, run_in_background, error_event=error_event)
        if body.background:
            return json_response(_present(await run_in_background()))
        return await respond_with_generation(
            request,
            start,
            self._service.timeouts,
            events=run if body.stream else None,
            collect=lambda answer: run(answer).collect(),
            error_event=error_event,
        )

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of prompt tokens of a response, without generating the response."""
        context = context_of(request)
        body = await self._service.intake.load(ResponsesRequest, request)
        model = await self._service.find_model(body.model, context, body)
        await context.count_request(model.name)
        turn = await self._turn(body, context)
        chat = await self._as_chat(body, _own_items(body), turn, offered_tools(body.tools or []), model, context)
        with translated_errors(translate_error_fields):
            plan = await ChatGeneration(self._service, chat, model, "", context).prepare()
        return json_response({"object": "response.input_tokens", "input_tokens": len(plan.input_ids)})

    async def get(self, request: Request) -> Response:
        """Return a response, or its events after `starting_after` if `stream` is true.

        Without Redis, the stream of a response that another gateway generates ends with the events
        that are in the store.
        """
        live = request.query_params.get("stream", "").lower() in ("true", "1")
        async with self._found(request, live) as found:
            after = _first_event(request)
            if isinstance(found, AnswerRun):
                if after is not None:
                    return self._stream(request, found.read(after))
                share = context_of(request).caller.share
                content = await render_in_turn(share, lambda: json_bytes(_present(found)))
                return Response(content, media_type="application/json")
            if after is None:
                return Response(found.response, media_type="application/json")
            entry = found.decoded()
            events = events_after(after, entry.response, entry.cuts)
            pieces = encode_in_pieces(events, context_of(request).caller.share)
            return StreamingResponse(pieces, headers=STREAM_HEADERS, media_type="text/event-stream")

    async def delete(self, request: Request) -> Response:
        """Delete a stored or running response."""
        response_id, owner = _response_id(request), _owner(request)
        async with self._found(request, live=True) as found:
            if isinstance(found, ChatRun):
                found.discard()
            elif isinstance(found, AnswerRun):
                await found.stop()
            await self._store.delete(response_id, owner)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Stop a running response, including a response that another gateway generates."""
        async with self._found(request, live=True) as found:
            if isinstance(found, AnswerRun):
                if found.over:
                    raise _not_running(_present(found)["status"])
                await found.stop()
                return json_response(_present(found))
        return await self._cancel_by_store(found)

    async def input_items(self, request: Request) -> Response:
        """Return a page of the items of a response's input."""
        async with self._found(request) as found:
            items = _form(found).items if isinstance(found, AnswerRun) else found.decoded().items
        return json_response(item_page(items, request.query_params))

    async def close(self) -> None:
        """Wait until the responses that have ended are stored, and close the store."""
        await self._tasks.wait()
        await self._store.close()

    @asynccontextmanager
    async def _found(self, request: Request, live: bool = False) -> AsyncIterator[AnswerRun | ResponseRecord]:
        """Yield the requested response: the running answer, or the row in the store.

        The request counts as a reader of a running answer until the block ends, and holds the
        memory of a row until the last byte is sent.

        Args:
            request: The request, whose path names the response.
            live: Prefer a running answer, at whichever gateway, to the row in the store.

        Raises:
            NotFoundError: The caller has no such response.
            UnavailableError: Another gateway may have the response, and Redis or the store cannot
                be reached, or the gateway holds too much data of requests in memory already.
        """
        response_id, owner = _response_id(request), _owner(request)
        row, run = None, await self._in_progress(response_id, owner, live)
        if run is None:
            row = await self._store.find(response_id, owner)
            if row.running and row.age >= LOST_RUN_TIMEOUT if row is not None else not self._store.shared:
                run = await self._in_progress(response_id, owner, live=True)
        if run is not None:
            try:
                yield run
            finally:
                run.leave()
        elif row is None:
            raise _not_found(response_id)
        else:
            self._service.intake.hold(_COPIES_PER_READER * row.size, context_of(request))
            yield row if not row.running or row.age < LOST_RUN_TIMEOUT else await self._lost(row)

    async def _in_progress(self, response_id: str, owner: str, live: bool) -> AnswerRun | None:
        """Return a running response, with the caller of this method as its reader.

        A response that has ended is not returned if it is in the store or was deleted.

        Args:
            response_id: The id of the response.
            owner: The owner of the response.
            live: Include responses that other gateways generate.
        """
        own = self._chats.runs.find(response_id, owner)
        if not _RUN_ID.fullmatch(response_id) or (own is None and not live):
            return None
        try:
            run = await self._chats.find(response_id, owner)
        except NotFoundError:
            return None
        if run is not None and (run.discarded or (run.over and (own is not None or self._store.shared))):
            run.leave()
            return None
        return run

    async def _lost(self, row: ResponseRecord) -> ResponseRecord:
        """Store a response as failed because its gateway is lost, and return the row."""
        entry = row.decoded()
        entry.fail("The gateway that generated this response was lost; create the response again.")
        failed = entry.to_row(group=row.group)
        await self._store.put(failed, new=False)
        return failed

    async def _cancel_by_store(self, row: ResponseRecord) -> Response:
        """Ask the gateway that generates a response to stop, through the store.

        Used where no Redis connects the gateways.
        """
        if not row.running:
            raise _not_running(row.decoded().response["status"])
        await self._store.request_cancellation(row.id, row.owner)
        deadline = asyncio.get_running_loop().time() + CANCEL_TIMEOUT
        while row.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(CANCEL_POLL_INTERVAL)
            found = await self._store.find(row.id, row.owner)
            if found is None:
                raise _not_found(row.id)
            row = found
        return Response(row.response, media_type="application/json")

    async def _turn(self, body: ResponsesRequest, context: RequestContext) -> ResponseTurn | None:
        """Return the conversation that the request names, or None if it names no conversation."""
        conversation_id = body.conversation_id
        if conversation_id is None:
            return None
        if body.previous_response_id is not None:
            raise InvalidRequestError(
                "A request cannot have both a conversation and a previous_response_id; leave one of them out.",
                param="conversation",
            )
        # SQLAlchemy is an optional dependency, and a gateway without conversations does not import
        # it.
        from llmops.gateway.conversations.conversation_turn import ResponseTurn

        return ResponseTurn(await self._conversations(), context.caller, conversation_id)

    def _is_to_be_stored(
        self, body: ResponsesRequest, own: list[Item], builder: ResponseBuilder, context: RequestContext
    ) -> bool:
        """Return True if the response is to be stored. Otherwise set its `store` to false.

        `own` are the items of the request itself, which are stored with the response.

        Raises:
            InvalidRequestError: The response cannot be stored, and the request needs a stored
                response.
        """
        limits, response = self._store.limits, builder.response
        if body.store is False:
            problem = "The request has store: false"
        elif not self._may_store(context.caller.tenant_id):
            problem = "The data of this tenant is not stored"
        elif not limits.entries:
            problem = "This gateway stores no responses"
        else:
            # Encoding is needed only for a large body; a short one fits after any expansion.
            size = context.work_bytes * _MAX_JSON_EXPANSION
            if size > limits.item_bytes:
                size = len(encode_json(own)) + len(encode_json(response))
            if size <= limits.item_bytes:
                return True
            problem = f"The request has {size:,} characters, and a stored response may have {limits.item_bytes:,}"
        if body.store or body.background:
            raise InvalidRequestError(f"{problem}; leave out store and background.", param="store")
        response["store"] = False
        return False

    async def _as_chat(
        self,
        body: ResponsesRequest,
        own: list[Item],
        turn: ResponseTurn | None,
        tools: OfferedTools,
        model: GenerativeModel,
        context: RequestContext,
    ) -> ChatRequest:
        """Return the equivalent chat request, with the messages of earlier responses.

        `own` are the items of the request itself.

        Raises:
            ApiError: The request is invalid or unsupported. The error uses the field names of this
                API.
        """
        intake, owner = self._service.intake, context.caller.owner
        stored = StoredContext(self._store, owner, intake.limits, lambda size: intake.hold(size, context))
        try:
            before = await turn.items(lambda size: intake.hold(size, context)) if turn is not None else []
        except NotFoundError as error:
            error.param = "conversation"
            raise
        items = [*before, *await stored.items(own, body.previous_response_id)]
        with translated_errors(translate_error_fields):
            chat = validate_body(ChatRequest, to_chat_request(body, items, tools))
            validate_chat(chat, model, self._service.limits)
        # The body's size does not include earlier messages, but the model reads them.
        context.work_bytes = max(context.work_bytes, max_rendered_characters(chat.messages))
        if (chat.n or 1) > 1:
            raise UnsupportedError("A response has one answer; leave out n.", param="n")
        report_ignored_fields(context, self._service, body, RESPONSES_IGNORED_FIELDS, extra=chat)
        report_dropped_tools(context, tools.left_out)
        return chat

    def _stream(
        self,
        request: Request,
        source: EventSource | Callable[[], Awaitable[AnswerRun]],
        error_event: Callable[[ApiError], bytes] = openai_error_event,
    ) -> Response:
        """Return a response that streams the events of `source`, or of the run that it returns.

        The answer continues when the client disconnects.
        """
        watcher = DisconnectWatcher(request.receive)

        async def open_source() -> EventSource:
            events = source if isinstance(source, EventSource) else (await source()).read()
            watcher.notify(events.cancel)
            return events

        return EventStreamResponse(open_source, watcher, self._service.timeouts, error_event=error_event)


def _check_tool_size(body: ResponsesRequest, size: int, limit: int) -> None:
    """Check that the tools of a body of `size` bytes are not longer than a prompt may be.

    The response repeats them in three events, also tools that are in no prompt.

    Raises:
        InvalidRequestError: The tools are longer.
    """
    if size > limit and (length := len(json_bytes(body.tools))) > limit:
        raise InvalidRequestError(f"The tools have {length:,} bytes; send at most {limit:,}.", param="tools")


def _own_items(body: ResponsesRequest) -> list[Item]:
    return [ensure_item_id(item, "input") for item in parse_input_items(body.input)]


def _first_event(request: Request) -> int | None:
    """Return the sequence number of the event after which a stream starts.

    The number is -1 for a stream of all events, and None if the request asks for no stream.

    Raises:
        InvalidRequestError: `stream` or `starting_after` is invalid.
    """
    stream, after = request.query_params.get("stream", "false").lower(), request.query_params.get("starting_after")
    is_number = after is None or (after.isdecimal() and len(after) <= 9)
    if stream in ("true", "1") and is_number:
        return -1 if after is None else int(after)
    if stream in ("false", "0") and after is None:
        return None
    raise InvalidRequestError(
        "stream must be true or false, and starting_after the sequence number of an event of a stream.",
        param="stream" if after is None else "starting_after",
    )


def _form(run: AnswerRun) -> BackgroundFormat:
    assert isinstance(run.format, BackgroundFormat)
    return run.format


def _present(run: AnswerRun) -> dict[str, Any]:
    """Return the current state of a response in the background, as JSON."""
    return _form(run).present(run)


def _not_running(status: str) -> InvalidRequestError:
    return InvalidRequestError(f"Only a response in progress can be cancelled; this one is {status}.")


def _response_id(request: Request) -> str:
    return str(request.path_params["response_id"])


def _owner(request: Request) -> str:
    return context_of(request).caller.owner


def _not_found(response_id: str) -> NotFoundError:
    return NotFoundError(
        f"Response with id '{response_id}' not found: it was not stored, was deleted, or belongs to another key."
    )
