"""POST /v1/responses; GET, DELETE, cancel and input_items of one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.answers.answer import Answer
from llmops.gateway.answers.chat import check_chat, start_chat
from llmops.gateway.answers.service import Service
from llmops.gateway.answers.sizes import characters
from llmops.gateway.conversations.builder import ResponseBuilder, new_id, new_response, replay
from llmops.gateway.conversations.chat import put_into_own_terms, to_chat
from llmops.gateway.conversations.events import Followed, written
from llmops.gateway.conversations.forwarding import forward
from llmops.gateway.conversations.items import Item, as_items
from llmops.gateway.conversations.run import ResponseRun, Running
from llmops.gateway.conversations.store import StoredResponse
from llmops.gateway.conversations.tools import OfferedTools, offered_tools
from llmops.gateway.endpoints.common import StartingEvents, json_response, respond
from llmops.gateway.endpoints.ignored_fields import note_ignored, note_left_out
from llmops.gateway.errors import ApiError, InvalidRequestError, NotFoundError, UnsupportedError
from llmops.gateway.fleet.serving import ServedModel
from llmops.gateway.http.body import validate
from llmops.gateway.http.context import RequestContext, context_of
from llmops.gateway.http.events import EventSource, EventStream
from llmops.gateway.http.watch import ClientWatch
from llmops.gateway.openai.chat import ChatRequest
from llmops.gateway.openai.responses import ResponsesRequest

IGNORED = frozenset(
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

Handler = Callable[[Request, StoredResponse, ResponseRun | None], Awaitable[Response]]


class Responses:
    """The endpoints; `create` makes a response, the others are about one that is stored or running."""

    def __init__(self, service: Service, running: Running) -> None:
        self._service, self._running, self._store = service, running, running.store
        self._background: set[asyncio.Task] = set()

    async def create(self, request: Request) -> Response:
        context = context_of(request)
        owner = context.caller.owner
        body = await self._service.intake.load(ResponsesRequest, request)
        model = self._service.models.get(body.model, context.caller)
        own = [_with_id(await self._resolved(item, owner)) for item in as_items(body.input)]
        before = await self._store.context(body.previous_response_id, owner) if body.previous_response_id else []
        tools = offered_tools(body.tools or [])
        chat = self._as_chat(body, [*before, *own], tools, model, context)
        # earlier messages are not part of this body, but of its work
        context.size = max(context.size, characters(chat.messages))
        builder = ResponseBuilder(new_response(body, model), tools.origins)
        running = None if body.store is False else self._running
        whole = not (body.stream or body.background)

        async def start() -> Answer:
            try:
                return await start_chat(self._service, chat, model, builder.id, context, whole=whole)
            except ApiError as error:
                put_into_own_terms(error)
                raise

        def run(answer: Answer) -> ResponseRun:
            return ResponseRun(answer, builder, own, owner, running)

        def failed(error: ApiError) -> bytes:
            return written([*builder.start(), *builder.fail(error)])

        if body.background and body.stream:
            watch = ClientWatch(request.receive)

            async def follow() -> EventSource:
                begun = run(await start()).begin()
                source = begun.follow()
                watch.tell(source.cancel)
                await self._in_background(begun, context)
                return source

            return self._stream(StartingEvents(follow, failed), watch)
        if body.background:
            begun = run(await start()).begin()
            await self._in_background(begun, context)
            return json_response(begun.entry().response)
        return await respond(
            request,
            start,
            self._service.timeouts,
            events=run if body.stream else None,
            collect=lambda answer: run(answer).collect(),
            failed=failed,
        )

    async def get(self, request: Request) -> Response:
        return await self._where_it_is(request, self._get)

    async def delete(self, request: Request) -> Response:
        return await self._where_it_is(request, self._delete)

    async def cancel(self, request: Request) -> Response:
        return await self._where_it_is(request, self._cancel)

    async def input_items(self, request: Request) -> Response:
        return await self._where_it_is(request, self._input_items)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._store.close()

    # -- of one response -------------------------------------------------------------------------------------------

    async def _where_it_is(self, request: Request, handle: Handler) -> Response:
        """By the worker that generates it, else by this one."""
        response_id, owner = request.path_params["response_id"], context_of(request).caller.owner
        run = self._running.find(response_id, owner)
        if run is not None:
            return await handle(request, run.entry(), run)
        entry = await self._store.get(response_id, owner)
        if entry.worker is not None:
            there = entry.worker != self._running.worker
            answer = await forward(request, entry.worker) if there else None
            if answer is not None:
                return answer
            await self._lost(entry)
        return await handle(request, entry, None)

    async def _lost(self, entry: StoredResponse) -> None:
        """Its worker died, or was started again since."""
        message = "The gateway worker that generated this response is gone."
        entry.response.update(status="failed", error={"code": "server_error", "message": message})
        entry.worker = None
        await self._store.put(entry)

    async def _get(self, request: Request, entry: StoredResponse, run: ResponseRun | None) -> Response:
        after = _asked_stream(request)
        if after is None:
            return json_response(entry.response)
        if run is not None:
            return self._following(request, run.follow(after))
        past = [event for event in replay(entry.response, entry.cuts) if event["sequence_number"] > after]
        source = Followed(written(past))
        source.end()
        return self._following(request, source)

    async def _delete(self, request: Request, entry: StoredResponse, run: ResponseRun | None) -> Response:
        if run is not None:
            run.cancel()
        await self._store.delete(entry.id, entry.owner)
        return json_response({"id": entry.id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request, entry: StoredResponse, run: ResponseRun | None) -> Response:
        if run is None:
            status = entry.response["status"]
            raise InvalidRequestError(f"Only a response in progress can be cancelled; this one is {status}.")
        run.cancel()
        return json_response(run.entry().response)

    async def _input_items(self, request: Request, entry: StoredResponse, run: ResponseRun | None) -> Response:
        items = entry.items[::-1]
        ids = [item["id"] for item in items] or [None]
        page = {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return json_response(page)

    # -- creating one ----------------------------------------------------------------------------------------------

    async def _resolved(self, item: Item, owner: str) -> Item:
        if item.get("type") != "item_reference":
            return item
        found = await self._store.find_item(str(item.get("id")), owner)
        if found is None:
            raise NotFoundError(f"Item with id '{item.get('id')}' not found.", param="input")
        return found

    def _as_chat(
        self,
        body: ResponsesRequest,
        items: list[Item],
        tools: OfferedTools,
        model: ServedModel,
        context: RequestContext,
    ) -> ChatRequest:
        try:
            chat = validate(ChatRequest, to_chat(body, items, tools))
            check_chat(chat, model, self._service.limits)
        except ApiError as error:
            put_into_own_terms(error)
            raise
        if (chat.n or 1) > 1:
            raise UnsupportedError("A response has one answer; leave out n.", param="n")
        note_ignored(context, self._service, body, IGNORED, extra=chat)
        note_left_out(context, tools.left_out)
        return chat

    async def _in_background(self, run: ResponseRun, context: RequestContext) -> None:
        """It goes on whatever its client does."""
        context.later = task = asyncio.create_task(run.in_background(), name=f"response-{run.id}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await run.known()

    def _following(self, request: Request, source: Followed) -> Response:
        """A reader who leaves ends this stream only."""
        watch = ClientWatch(request.receive)
        watch.tell(source.cancel)
        return self._stream(source, watch)

    def _stream(self, source: EventSource, watch: ClientWatch) -> Response:
        timeouts = self._service.timeouts
        return EventStream(source, watch, patience=timeouts.client, keepalive=timeouts.keepalive)


def _asked_stream(request: Request) -> int | None:
    """The event after which a stream is to start, -1 for all of it; None where no stream is asked for."""
    query = request.query_params
    stream, after = query.get("stream", "false").lower(), query.get("starting_after")
    if stream not in ("true", "false", "1", "0"):
        raise InvalidRequestError("stream must be true or false.", param="stream")
    if stream in ("false", "0"):
        if after is not None:
            raise InvalidRequestError("starting_after needs stream to be true.", param="starting_after")
        return None
    if after is None:
        return -1
    if not after.isdecimal() or len(after) > 9:
        raise InvalidRequestError("starting_after must be the sequence number of an event.", param="starting_after")
    return int(after)


def _with_id(item: Item) -> Item:
    prefixes = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    return {"id": new_id(prefixes.get(str(item.get("type")), "msg")), **item}
