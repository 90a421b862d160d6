"""The endpoint POST /v1/chat/completions, and the routes that resume or stop its streams."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.generation_response import render_prompt_logprobs, respond_with_generation
from llmops.gateway.api.ignored_fields import COMMON_IGNORED_FIELDS, report_ignored_fields
from llmops.gateway.api.openai_chunks import (
    ChatChunks,
    chat_logprob_entry,
    chat_logprobs,
    message_of,
    usage_counts,
)
from llmops.gateway.api.resumable_chats import ResumableChats, check_resumable
from llmops.gateway.generation.answer import Answer, ChoiceDelta
from llmops.gateway.generation.answer_events import AnswerEvents
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.chat_generation import ChatGeneration, validate_chat
from llmops.gateway.generation.choice import Choice
from llmops.gateway.generation.parsers.output_processor import OutputDelta, add_deltas, merge_adjacent
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.request_context import context_of
from llmops.gateway.http.sse import DisconnectWatcher
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.gateway.schemas.response_schemas import ChatCompletion, StoppedRunResponse

#: Fields that are accepted without effect, so that clients which always send them work.
CHAT_IGNORED_FIELDS = COMMON_IGNORED_FIELDS | {
    *("store", "prompt_cache_options", "prompt_cache_retention", "verbosity", "moderation", "include_reasoning"),
}

#: Name of the request header that asks for a stream that can be resumed, with the value `true`.
RESUME_HEADER = b"x-llmops-resume"


class ChatCompletionsEndpoint:
    """The endpoint of chat completions, and the routes of streams that can be resumed."""

    def __init__(self, service: AppState, chats: ResumableChats) -> None:
        self._service, self._chats = service, chats

    def add_routes(self, app: GatewayApp) -> None:
        """Add the routes to `app`."""
        app.add_endpoint(
            "POST", "/v1/chat/completions", self.create, "Create a chat completion", ChatCompletion, body=ChatRequest
        )
        one, path = "/v1/chat/completions/{run_id}", {"run_id": "The id of an answer whose stream can be resumed."}
        app.add_endpoint(
            "GET",
            one,
            self._chats.resume,
            "Read the rest of a chat completion",
            ChatCompletion,
            path_parameters=path,
            streams=True,
        )
        app.add_endpoint(
            "DELETE", one, self._chats.stop, "Stop a chat completion", StoppedRunResponse, path_parameters=path
        )

    async def create(self, request: Request) -> Response:
        """Generate the next message of a chat, streamed or whole."""
        context = context_of(request)
        body = await self._service.intake.load(ChatRequest, request)
        context.mark("parse")
        model = await self._service.find_model(body.model, context, body, overflow=True)
        validate_chat(body, model, self._service.limits)
        report_ignored_fields(context, self._service, body, CHAT_IGNORED_FIELDS)
        answer_id, created = "chatcmpl-" + secrets.token_hex(12), int(time.time())
        generation = ChatGeneration(self._service, body, model, answer_id, context)
        if body.stream and context.headers.get(RESUME_HEADER) == b"true":
            check_resumable(body)
            watcher = DisconnectWatcher(request.receive)
            return self._chats.respond(partial(self._chats.start, generation, watcher, openai=True), watcher)

        async def collect(answer: Answer) -> dict[str, Any]:
            choices, prompt = await collect_choices(answer), {}
            if (count := body.prompt_logprobs) is not None:
                rendered = await render_prompt_logprobs(answer.choices, count, self._service, model, context)
                prompt = {"prompt_logprobs": rendered}
            return {
                "id": answer_id,
                "object": "chat.completion",
                "created": created,
                "model": body.model,
                "choices": choices,
                "usage": usage_counts(answer),
                "service_tier": context.service_tier if body.service_tier else None,
                "system_fingerprint": None,
                **prompt,
            }

        return await respond_with_generation(
            request,
            partial(generation.start, whole=not body.stream),
            self._service.timeouts,
            events=partial(ChatEvents, answer_id, body, created) if body.stream else None,
            collect=collect,
        )


class ChatEvents(AnswerEvents):
    """The event stream of a chat completion.

    The stream has the role, text and finish reason of each choice, then the usage and [DONE].
    """

    def __init__(self, answer_id: str, body: ChatRequest, created: int, answer: Answer) -> None:
        super().__init__(answer)
        self._chunks = ChatChunks(answer_id, body, created, len(answer.choices))
        self._opened = [False] * len(answer.choices)

    def render(self, delta: ChoiceDelta) -> bytes:
        """Return the chunks for one piece of output, encoded."""
        choice, text, finished = delta
        index = choice.index
        if self._opened[index] and text and choice.plain and not choice.done and choice.logprobs is None:
            return self._chunks.content(index, text)
        parts: list[bytes] = []
        if not self._opened[index]:
            self._opened[index] = True
            parts.append(self._chunks.role(index))
        entries = choice.take_logprobs(text)
        if (text and choice.plain) or entries:
            # Text of a tool call or of reasoning has log-probabilities too. They belong to the
            # choice, so they are sent in a chunk without text.
            parts.append(self._chunks.content(index, text if choice.plain else "", entries))
        if not choice.plain:
            parts += [self._chunks.piece(index, piece) for piece in choice.sort(text)]
        if finished:
            parts.append(self._chunks.finish(index, choice.finish_reason))
        return b"".join(parts)

    def end(self) -> bytes:
        """Return the events that end the stream, encoded."""
        return self._chunks.last(self._answer)


async def collect_choices(answer: Answer) -> list[dict[str, Any]]:
    """Read an answer to its end and return its choices, as JSON objects."""
    pieces: defaultdict[Choice, list[OutputDelta]] = defaultdict(list)
    entries: defaultdict[Choice, list[dict[str, Any]]] = defaultdict(list)
    while (delta := await answer.next()) is not None:
        choice, text, _ = delta
        add_deltas(pieces[choice], choice.sort(text))
        if choice.logprobs is not None:
            entries[choice].extend(map(chat_logprob_entry, choice.take_logprobs(text) or ()))
    return [
        {
            "index": choice.index,
            "message": message_of(merge_adjacent(pieces[choice])),
            "logprobs": chat_logprobs(entries[choice]) if choice.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
        }
        for choice in answer.choices
    ]
