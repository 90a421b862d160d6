"""POST /v1/responses; GET, DELETE, cancel and input_items of one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.errors import ApiError, InvalidRequestError, NotFoundError, UnsupportedError
from llmops.gateway.http.body import parse, read_body
from llmops.gateway.http.context import RequestContext, context_of
from llmops.gateway.openai.answer import Answer
from llmops.gateway.openai.chat_answer import check_chat, start_chat
from llmops.gateway.openai.endpoints.common import json_response, note_ignored, respond
from llmops.gateway.openai.responses.builder import ResponseBuilder, new_id
from llmops.gateway.openai.responses.chat import renamed_param, to_chat
from llmops.gateway.openai.responses.items import Item, as_items
from llmops.gateway.openai.responses.run import ResponseRun
from llmops.gateway.openai.responses.store import ResponseStore, StoredResponse
from llmops.gateway.openai.responses.types import ResponsesRequest
from llmops.gateway.openai.service import Service
from llmops.gateway.openai.types.chat import ChatRequest
from llmops.gateway.serving import ServedModel

log = logging.getLogger(__name__)
IGNORED = frozenset(
    {
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


class Responses:
    """The endpoints; `create` makes a response, the others are about one that is stored."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service, self._store = service, store
        self._background: set[asyncio.Task] = set()

    async def create(self, request: Request) -> Response:
        context, owner = context_of(request), owner_of(request)
        body = parse(ResponsesRequest, await read_body(request, self._service.limits.body_bytes))
        model = self._service.models.get(body.model)
        own = [_with_id(item) for item in self._resolved(as_items(body.input), owner)]
        before = self._store.context(body.previous_response_id, owner) if body.previous_response_id else []
        chat = self._as_chat(body, [*before, *own], model, context)
        builder = ResponseBuilder(body, body.model)
        store = None if body.store is False else self._store

        async def start() -> Answer:
            try:
                return await start_chat(self._service, chat, model, builder.id, context)
            except ApiError as error:
                error.param = renamed_param(error.param)
                raise

        def run(answer: Answer) -> ResponseRun:
            return ResponseRun(answer, builder, own, store, owner)

        if body.background:
            return await self._in_background(start, run, builder)
        return await respond(
            request, start, events=run if body.stream else None, collect=lambda answer: run(answer).collect()
        )

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise UnsupportedError("Streaming a stored response is not supported; poll it instead.", param="stream")
        return json_response(self._entry(request).response)

    async def delete(self, request: Request) -> Response:
        entry = self._entry(request)
        if entry.cancel is not None:
            entry.cancel()
        self._store.delete(entry.id, entry.owner)
        return json_response({"id": entry.id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        entry = self._entry(request)
        if entry.cancel is None:
            status = entry.response["status"]
            raise InvalidRequestError(f"Only a response in progress can be cancelled; this one is {status}.")
        entry.cancel()
        return json_response(entry.response)

    async def input_items(self, request: Request) -> Response:
        items = self._entry(request).items[::-1]
        ids = [item["id"] for item in items] or [None]
        page = {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return json_response(page)

    def close(self) -> None:
        for task in self._background:
            task.cancel()

    def _entry(self, request: Request) -> StoredResponse:
        return self._store.get(request.path_params["response_id"], owner_of(request))

    def _resolved(self, items: list[Item], owner: str) -> list[Item]:
        return [self._referenced(item, owner) if item.get("type") == "item_reference" else item for item in items]

    def _referenced(self, item: Item, owner: str) -> Item:
        found = self._store.find_item(str(item.get("id")), owner)
        if found is None:
            raise NotFoundError(f"Item with id '{item.get('id')}' not found.", param="input")
        return found

    def _as_chat(
        self, body: ResponsesRequest, items: list[Item], model: ServedModel, context: RequestContext
    ) -> ChatRequest:
        try:
            chat = parse(ChatRequest, json.dumps(to_chat(body, items)).encode())
            check_chat(chat, model, self._service.limits)
        except ApiError as error:
            error.param = renamed_param(error.param)
            raise
        if (chat.n or 1) > 1:
            raise UnsupportedError("A response has one answer; leave out n.", param="n")
        note_ignored(context, self._service.metrics, body, IGNORED, extra=chat)
        return chat

    async def _in_background(self, start: Any, run: Any, builder: ResponseBuilder) -> Response:
        answer: Answer = await start()
        background: ResponseRun = run(answer)
        task = asyncio.create_task(_finish(answer, background), name=f"response-{builder.id}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return json_response(builder.response)


async def _finish(answer: Answer, run: ResponseRun) -> None:
    try:
        await run.collect()
    except ApiError as error:
        log.info("a background response ended early: %s", error.message)
    finally:
        answer.close()


def owner_of(request: Request) -> str:
    """Whose responses these are: nobody sees those of another key."""
    return hashlib.sha256(request.headers.get("authorization", "").encode()).hexdigest()


def _with_id(item: Item) -> Item:
    prefixes = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    return {"id": new_id(prefixes.get(str(item.get("type")), "msg")), **item}
