"""The endpoints POST /v1/messages and POST /v1/messages/count_tokens.

Both endpoints convert their request to a chat completions request, and write Anthropic's format.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.anthropic.chat_conversion import (
    dropped_tool_types,
    ignored_message_fields,
    to_chat_request,
    translate_error_fields,
    without_session_blocks,
)
from llmops.gateway.api.anthropic.schemas import (
    AnthropicErrorResponse,
    CountTokensRequest,
    MessageResponse,
    MessagesRequest,
    TokenCount,
)
from llmops.gateway.api.anthropic.stream_events import (
    PING,
    MessageEvents,
    content_blocks,
    message_usage,
    stop_fields,
)
from llmops.gateway.api.generation_response import json_response, respond_with_generation, translated_errors
from llmops.gateway.api.ignored_fields import report_dropped_tools, report_ignored_fields
from llmops.gateway.errors import ApiError, UnsupportedError, log_detail
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.chat_generation import ChatGeneration, validate_chat
from llmops.gateway.generation.choice import Choice
from llmops.gateway.generation.parsers.output_processor import OutputDelta, ToolCallDelta, add_deltas
from llmops.gateway.http.anthropic_errors import REQUEST_ID_HEADER, envelope_json
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.request_body import validate_body
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.http.sse import encode_event
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import ChatRequest


class MessagesEndpoints:
    """The endpoints of Anthropic's Messages API."""

    def __init__(self, service: AppState) -> None:
        self._service = service

    def add_routes(self, app: GatewayApp) -> None:
        """Add the routes to `app`."""
        add = partial(app.add_endpoint, "POST", tag="anthropic", errors=AnthropicErrorResponse)
        add("/v1/messages", self.create, "Create a message", MessageResponse, body=MessagesRequest)
        add(
            "/v1/messages/count_tokens",
            self.count_tokens,
            "Count a message's tokens",
            TokenCount,
            body=CountTokensRequest,
        )

    async def create(self, request: Request) -> Response:
        """Generate a message, streamed or whole."""
        context = context_of(request)
        with translated_errors(translate_error_fields):
            body = await self._service.intake.load(MessagesRequest, request)
        context.mark("parse")
        model = await self._service.find_model(body.model, context, body, overflow=True)
        chat = self._as_chat(body, model, context)
        head = _head("msg_" + secrets.token_hex(12), body.model)

        async def start() -> Answer:
            with translated_errors(translate_error_fields):
                generation = ChatGeneration(self._service, chat, model, head["id"], context)
                return await generation.start(whole=not body.stream, fit=True)

        def stop(answer: Answer, choice: Choice, called: bool) -> dict[str, Any]:
            return stop_fields(
                choice, called=called, cut=body.max_tokens > model.card.max_seq_len - answer.prompt_tokens
            )

        def error_event(error: ApiError) -> bytes:
            log_detail(error)
            return encode_event(envelope_json(error, context.request_id), "error")

        def events(answer: Answer) -> MessageEvents:
            return MessageEvents(answer, head, lambda choice, called: stop(answer, choice, called), error_event)

        async def collect(answer: Answer) -> dict[str, Any]:
            pieces_of: defaultdict[Choice, list[OutputDelta]] = defaultdict(list)
            while (delta := await answer.next()) is not None:
                add_deltas(pieces_of[delta.choice], delta.choice.sort(delta.text))
            (choice,) = answer.choices
            pieces = pieces_of[choice]
            called = any(isinstance(piece, ToolCallDelta) for piece in pieces)
            stop_reason = stop(answer, choice, called)
            return {**head, "content": content_blocks(pieces), **stop_reason, "usage": message_usage(answer)}

        response = await respond_with_generation(
            request,
            start,
            self._service.timeouts,
            events=events if body.stream else None,
            collect=collect,
            error_event=error_event,
            keepalive_event=PING,
        )
        return _with_request_id(response, context)

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a message's prompt."""
        context = context_of(request)
        with translated_errors(translate_error_fields):
            body = await self._service.intake.load(CountTokensRequest, request)
        model = await self._service.find_model(body.model, context, body)
        await context.count_request(model.name)
        chat = self._as_chat(body, model, context)
        with translated_errors(translate_error_fields):
            plan = await ChatGeneration(self._service, chat, model, "", context).prepare()
        return _with_request_id(json_response({"input_tokens": len(plan.input_ids)}), context)

    def _as_chat(self, body: CountTokensRequest, model: GenerativeModel, context: RequestContext) -> ChatRequest:
        template = model.template.source if model.template else ""
        dropped: list[str] = []
        if self._service.drop_session_blocks:
            body.system, dropped = without_session_blocks(body.system)
        with translated_errors(partial(translate_error_fields, sent=body.model_extra or {})):
            chat = validate_body(ChatRequest, to_chat_request(body, template))
            validate_chat(chat, model, self._service.limits)
        if (chat.n or 1) > 1:
            raise UnsupportedError("A message has one answer; leave out n.", param="n")
        report_ignored_fields(context, self._service, body, ignored_message_fields(body, template), extra=chat)
        context.ignored_fields.extend(dropped)
        report_dropped_tools(context, dropped_tool_types(body))
        return chat


def _head(message_id: str, model: str) -> dict[str, Any]:
    """Return the fields of a message that are known before its content."""
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


def _with_request_id(response: Response, context: RequestContext) -> Response:
    response.headers[REQUEST_ID_HEADER] = context.request_id
    return response
