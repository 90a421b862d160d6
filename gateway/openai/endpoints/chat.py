"""POST /v1/chat/completions"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.http.body import parse, read_body
from llmops.gateway.http.context import RequestContext, context_of
from llmops.gateway.messages import EngineRequest, Guide
from llmops.gateway.openai.answer import Advance, Answer
from llmops.gateway.openai.choice import Choice, LogprobLog
from llmops.gateway.openai.chunks import ChatChunks, chat_logprobs, tool_call_delta, usage
from llmops.gateway.openai.endpoints.common import AnswerEvents, ignored_fields, respond
from llmops.gateway.openai.pieces import Piece, Processor, Reasoning, Text, ToolCall
from llmops.gateway.openai.prompt import render_chat
from llmops.gateway.openai.sampling import (
    check_capabilities,
    check_guide,
    check_logprobs,
    endings_of,
    output_length,
    sampling_of,
)
from llmops.gateway.openai.service import Service, open_streams
from llmops.gateway.openai.types.chat import ChatRequest
from llmops.gateway.serving import ServedModel

IGNORED = frozenset(
    {
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
        "prediction",
        "moderation",
        "priority",
        "cache_salt",
        "include_reasoning",
        "include_stop_str_in_output",
    }
)


class ChatCompletions:
    """The endpoint; `handle` is the route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request) -> Response:
        context = context_of(request)
        body = parse(ChatRequest, await read_body(request, self._service.limits.body_bytes))
        model = self._service.models.get(body.model)
        self._check(body, model)
        context.ignored = ignored_fields(body, IGNORED)
        for field in context.ignored:
            self._service.metrics.ignored.labels(field if field in IGNORED else "unknown").inc()
        answer_id, created = "chatcmpl-" + secrets.token_hex(12), int(time.time())

        def events(answer: Answer) -> AnswerEvents:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            chunks = ChatChunks(answer_id, body.model, created, len(answer.choices), include_usage=include_usage)
            return ChatEvents(answer, chunks)

        async def collect(answer: Answer) -> dict[str, Any]:
            choices = await collect_choices(answer)
            return {
                "id": answer_id,
                "object": "chat.completion",
                "created": created,
                "model": body.model,
                "choices": choices,
                "usage": usage(answer.prompt_tokens, answer.completion_tokens),
                "service_tier": "default" if body.service_tier else None,
                "system_fingerprint": None,
            }

        return await respond(
            request,
            lambda: self._start(body, model, answer_id, context),
            events=events if body.stream else None,
            collect=collect,
        )

    def _check(self, body: ChatRequest, model: ServedModel) -> None:
        if body.functions or body.function_call:
            raise InvalidRequestError("functions are superseded; use tools and tool_choice.", param="functions")
        if body.audio or set(body.modalities or ["text"]) != {"text"}:
            raise InvalidRequestError("Only text answers are supported.", param="audio" if body.audio else "modalities")
        if body.web_search_options is not None:
            raise InvalidRequestError("web_search_options are not supported.", param="web_search_options")
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError("stream_options need stream to be true.", param="stream_options")
        most = self._service.limits.messages
        if len(body.messages) > most:
            raise InvalidRequestError(f"At most {most} messages are allowed.", param="messages")
        check_capabilities(body, model.card)
        top = body.top_logprobs or 0
        if top and not body.logprobs:
            raise InvalidRequestError("top_logprobs need logprobs to be true.", param="top_logprobs")
        check_logprobs(bool(body.logprobs), top, model.card, "top_logprobs")

    async def _start(self, body: ChatRequest, model: ServedModel, answer_id: str, context: RequestContext) -> Answer:
        service = self._service
        guide = guide_of(body)
        check_guide(guide, model.card, "response_format")
        size = sum(len(m.content) if isinstance(m.content, str) else 4096 for m in body.messages)
        ids = await service.workers.run(lambda: prepare(model, body), size)
        wanted, field = _wanted_length(body)
        length = output_length(wanted, len(ids), model.card, param=field)
        endings = endings_of(body, model.card, service.limits)
        engine_request = EngineRequest(
            request_id=answer_id,
            input_ids=ids,
            max_tokens=length,
            sampling=sampling_of(body),
            n=body.n or 1,
            min_tokens=body.min_tokens or 0,
            end_ids=endings.end_ids,
            logprobs=bool(body.logprobs),
            guide=guide,
            lora_id=model.lora_id,
        )
        end_ids = frozenset(endings.end_ids)
        choices = [
            Choice(
                index,
                model.tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens is not False),
                max_tokens=length,
                end_ids=end_ids,
                stops=endings.stops,
                processor=processor_for(model, body),
                logprobs=LogprobLog(model.tokenizer.token_bytes) if body.logprobs else None,
            )
            for index in range(engine_request.n)
        ]
        meter = service.metrics.meter(model.name, context.started, len(ids))
        stream = await open_streams(model.engine, [engine_request])
        return Answer(stream, choices, meter, service.timeouts, len(ids))


def prepare(model: ServedModel, body: ChatRequest) -> list[int]:
    """Prompt text and its tokens; the template writes the special tokens itself."""
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
    return model.tokenizer.encode(render_chat(model, body, tools), add_special_tokens=False)


def processor_for(model: ServedModel, body: ChatRequest) -> Processor | None:
    """What sorts one choice's text into reasoning, tool calls and content; None when all of it is content."""
    return None


def guide_of(body: ChatRequest) -> Guide | None:
    """The grammar that the request asks for."""
    return None


def _wanted_length(body: ChatRequest) -> tuple[int | None, str]:
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


class ChatEvents(AnswerEvents):
    """chat.completion.chunk events: the role, the text, the reason why it ended; then usage and [DONE]."""

    def __init__(self, answer: Answer, chunks: ChatChunks) -> None:
        super().__init__(answer)
        self._chunks = chunks
        self._begun = [False] * len(answer.choices)

    def render(self, advance: Advance) -> bytes:
        choice, text, ended = advance
        index = choice.index
        if self._begun[index] and text and choice.plain and not choice.done and choice.logprobs is None:
            return self._chunks.content(index, text)
        parts = []
        if not self._begun[index]:
            self._begun[index] = True
            parts.append(self._chunks.role(index))
        parts.extend(self._content(choice, text))
        if ended:
            parts.append(self._chunks.finish(choice))
        return b"".join(parts)

    def _content(self, choice: Choice, text: str) -> list[bytes]:
        if not choice.plain:
            return [self._chunks.piece(choice.index, piece) for piece in choice.sort(text)]
        entries = choice.take_logprobs(text)
        if not text and not entries:
            return []
        return [self._chunks.content(choice.index, text, entries)]

    def end(self) -> bytes:
        return self._chunks.last(self._answer.prompt_tokens, self._answer.completion_tokens)


async def collect_choices(answer: Answer) -> list[dict[str, Any]]:
    """All choices, complete."""
    pieces: list[list[Piece]] = [[] for _ in answer.choices]
    entries: list[list] = [[] for _ in answer.choices]
    while (advance := await answer.next()) is not None:
        choice, text, _ = advance
        pieces[choice.index].extend(choice.sort(text))
        entries[choice.index].extend(choice.take_logprobs(text) or ())
    return [
        {
            "index": choice.index,
            "message": message_of(pieces[choice.index]),
            "logprobs": chat_logprobs(entries[choice.index]) if choice.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
        }
        for choice in answer.choices
    ]


def message_of(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The assistant message that streamed pieces add up to."""
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        if isinstance(piece, ToolCall):
            known = calls.get(piece.index)
            calls[piece.index] = known._replace(arguments=known.arguments + piece.arguments) if known else piece
    content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_whole_call(calls[index]) for index in sorted(calls)]
    return message


def _whole_call(call: ToolCall) -> dict[str, Any]:
    whole = tool_call_delta(call)
    del whole["index"]
    return whole
