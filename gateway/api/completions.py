"""The endpoint POST /v1/completions."""

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
from llmops.gateway.api.openai_chunks import CompletionChunks, completion_logprobs, usage_counts
from llmops.gateway.generation.answer import Answer, ChoiceDelta
from llmops.gateway.generation.answer_events import AnswerEvents
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.choice import Choice, TokenLogprob
from llmops.gateway.generation.completion_generation import (
    CompletionGeneration,
    validate_completion,
)
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.request_context import context_of
from llmops.gateway.schemas.request_fields import CompletionRequest
from llmops.gateway.schemas.response_schemas import Completion


class CompletionsEndpoint:
    """The endpoint of text completions.

    Choices are numbered prompt by prompt: the choices of the first prompt come first.
    """

    def __init__(self, service: AppState) -> None:
        self._service = service

    def add_routes(self, app: GatewayApp) -> None:
        """Add the route to `app`."""
        app.add_endpoint(
            "POST", "/v1/completions", self.create, "Create a completion", Completion, body=CompletionRequest
        )

    async def create(self, request: Request) -> Response:
        """Continue one or several prompts, streamed or whole."""
        context = context_of(request)
        body = await self._service.intake.load(CompletionRequest, request)
        context.mark("parse")
        model = await self._service.find_model(body.model, context, body)
        validate_completion(body, model)
        report_ignored_fields(context, self._service, body, COMMON_IGNORED_FIELDS)
        answer_id, created = "cmpl-" + secrets.token_hex(12), int(time.time())
        generation = CompletionGeneration(self._service, body, model, answer_id, context)

        async def collect(answer: Answer) -> dict[str, Any]:
            choices, n = await collect_choices(answer), body.n or 1
            if body.prompt_logprobs is not None:
                for start in range(0, len(choices), n):
                    own = answer.choices[start : start + n]
                    rendered = await render_prompt_logprobs(own, body.prompt_logprobs, self._service, model, context)
                    for choice in choices[start : start + n]:
                        choice["prompt_logprobs"] = rendered
            return {
                "id": answer_id,
                "object": "text_completion",
                "created": created,
                "model": body.model,
                "choices": choices,
                "usage": usage_counts(answer),
                "system_fingerprint": None,
            }

        return await respond_with_generation(
            request,
            generation.start,
            self._service.timeouts,
            events=partial(CompletionEvents, answer_id, body, created) if body.stream else None,
            collect=collect,
        )


class CompletionEvents(AnswerEvents):
    """The event stream of a text completion."""

    def __init__(self, answer_id: str, body: CompletionRequest, created: int, answer: Answer) -> None:
        super().__init__(answer)
        self._chunks = CompletionChunks(answer_id, body, created, len(answer.choices))

    def render(self, delta: ChoiceDelta) -> bytes:
        """Return the chunks for one piece of output, encoded."""
        choice, text, finished = delta
        entries = choice.take_logprobs(text)
        data = b""
        if text or entries:
            logprobs = completion_logprobs(entries) if entries is not None else None
            data = self._chunks.content(choice.index, text, logprobs)
        return data + self._chunks.finish(choice) if finished else data

    def end(self) -> bytes:
        """Return the events that end the stream, encoded."""
        return self._chunks.last(self._answer)


async def collect_choices(answer: Answer) -> list[dict[str, Any]]:
    """Read an answer to its end and return its choices, as JSON objects."""
    texts: defaultdict[Choice, list[str]] = defaultdict(list)
    entries: defaultdict[Choice, list[TokenLogprob]] = defaultdict(list)
    while (delta := await answer.next()) is not None:
        texts[delta.choice].append(delta.text)
        entries[delta.choice].extend(delta.choice.take_logprobs(delta.text) or ())
    return [
        {
            "index": choice.index,
            "text": "".join(texts[choice]),
            "logprobs": completion_logprobs(entries[choice]) if choice.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
        }
        for choice in answer.choices
    ]
