"""POST /v1/messages and /v1/messages/count_tokens"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.answers.answer import Answer
from llmops.gateway.answers.chat import check_chat, plan_in_turn, start_chat
from llmops.gateway.answers.choice import Choice
from llmops.gateway.answers.parsers.pieces import Piece, ToolCall
from llmops.gateway.answers.sampling import room_for
from llmops.gateway.answers.service import Service
from llmops.gateway.endpoints.common import json_response, respond
from llmops.gateway.endpoints.ignored_fields import note_ignored, note_left_out
from llmops.gateway.endpoints.messages.blocks import blocks_of, stop_of, usage_of
from llmops.gateway.endpoints.messages.chat import ignored_in, left_out, put_into_own_terms, to_chat
from llmops.gateway.endpoints.messages.events import MessageEvents
from llmops.gateway.endpoints.messages.wire import CountTokensRequest, MessagesRequest
from llmops.gateway.errors import ApiError, UnsupportedError
from llmops.gateway.fleet.serving import ServedModel
from llmops.gateway.http import anthropic
from llmops.gateway.http.body import validate
from llmops.gateway.http.context import RequestContext, context_of
from llmops.gateway.openai.chat import ChatRequest


class Messages:
    """The endpoints; `create` makes a message, `count_tokens` tells what its prompt would be."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        context = context_of(request)
        with _own_terms():
            body = await self._service.intake.load(MessagesRequest, request)
        context.mark("parse")
        model = self._service.models.get(body.model, context.caller)
        chat = self._as_chat(body, model, context)
        head = _head("msg_" + secrets.token_hex(12), body.model)

        async def start() -> Answer:
            with _own_terms():
                return await start_chat(
                    self._service, chat, model, head["id"], context, whole=not body.stream, fit=True
                )

        def stop(answer: Answer, choice: Choice, called: bool) -> dict[str, Any]:
            return stop_of(choice, called=called, cut=body.max_tokens > room_for(model.card, answer.prompt_tokens))

        def failed(error: ApiError) -> bytes:
            return anthropic.error_event(error, context.request_id)

        def events(answer: Answer) -> MessageEvents:
            return MessageEvents(answer, head, lambda choice, called: stop(answer, choice, called), failed)

        async def collect(answer: Answer) -> dict[str, Any]:
            added: defaultdict[Choice, list[Piece]] = defaultdict(list)
            while (delta := await answer.next()) is not None:
                added[delta.choice] += delta.choice.sort(delta.text)
            (choice,) = answer.choices
            pieces = added[choice]
            called = any(isinstance(piece, ToolCall) for piece in pieces)
            ended = stop(answer, choice, called)
            return {**head, "content": blocks_of(pieces), **ended, "usage": usage_of(answer)}

        response = await respond(
            request,
            start,
            self._service.timeouts,
            events=events if body.stream else None,
            collect=collect,
            failed=failed,
            sign=anthropic.PING,
        )
        return _named(response, context)

    async def count_tokens(self, request: Request) -> Response:
        context = context_of(request)
        with _own_terms():
            body = await self._service.intake.load(CountTokensRequest, request)
        model = self._service.models.get(body.model, context.caller)
        chat = self._as_chat(body, model, context)
        with _own_terms():
            plan = await plan_in_turn(self._service, chat, model, context)
        return _named(json_response({"input_tokens": len(plan.input_ids)}), context)

    def _as_chat(self, body: CountTokensRequest, model: ServedModel, context: RequestContext) -> ChatRequest:
        template = model.template.source if model.template else ""
        with _own_terms():
            chat = validate(ChatRequest, to_chat(body, template))
            check_chat(chat, model, self._service.limits)
        if (chat.n or 1) > 1:
            raise UnsupportedError("A message is one answer; leave out n.", param="n")
        note_ignored(context, self._service, body, ignored_in(body, template), extra=chat)
        note_left_out(context, left_out(body))
        return chat


@contextmanager
def _own_terms() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        put_into_own_terms(error)
        raise


def _head(message_id: str, model: str) -> dict[str, Any]:
    """A message that nothing was generated for yet."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
    }


def _named(response: Response, context: RequestContext) -> Response:
    response.headers[anthropic.REQUEST_ID] = context.request_id
    return response
