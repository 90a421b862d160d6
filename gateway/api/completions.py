"""POST /v1/completions"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.generation_response import respond_with_generation
from llmops.gateway.api.ignored_fields import report_ignored_fields
from llmops.gateway.api.openai_chunks import CompletionChunks, completion_logprobs, usage_counts
from llmops.gateway.generation.answer import Answer, ChoiceDelta
from llmops.gateway.generation.answer_events import AnswerEvents
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.choice import Choice, TokenLogprob
from llmops.gateway.generation.completion_generation import (
    echoed_prompts,
    sequences_per_prompt,
    start_completion,
    validate_completion,
)
from llmops.gateway.http.request_context import context_of
from llmops.gateway.schemas.completion_request import CompletionRequest

COMPLETION_IGNORED_FIELDS = frozenset(
    {
        "priority",
        "cache_salt",
        "include_stop_str_in_output",
        "stream_options.include_obfuscation",
        "stream_options.continuous_usage_stats",
    }
)


class CompletionsEndpoint:
    """The endpoint; `handle` is the route. Choices are numbered prompt by prompt, as OpenAI does."""

    def __init__(self, service: AppState) -> None:
        self._service = service

    async def handle(self, request: Request) -> Response:
        context = context_of(request)
        body = await self._service.intake.load(CompletionRequest, request)
        context.mark("parse")
        model = self._service.models.get(body.model, context.caller)
        validate_completion(body, model)
        report_ignored_fields(context, self._service, body, COMPLETION_IGNORED_FIELDS)
        answer_id, created = "cmpl-" + secrets.token_hex(12), int(time.time())
        echoes: list[str] = []

        async def start() -> Answer:
            echoes.extend(await echoed_prompts(body, model, self._service, context))
            return await start_completion(self._service, body, model, answer_id, context)

        def events(answer: Answer) -> AnswerEvents:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            chunks = CompletionChunks(answer_id, body.model, created, len(answer.choices), include_usage=include_usage)
            return CompletionEvents(answer, chunks, echoes)

        async def collect(answer: Answer) -> dict[str, Any]:
            texts = await collect_texts(answer, echoes)
            kept = best_texts(texts, sequences_per_prompt(body), body.n or 1)
            return {
                "id": answer_id,
                "object": "text_completion",
                "created": created,
                "model": body.model,
                "choices": [one.rendered(at, body.logprobs is not None) for at, one in enumerate(kept)],
                "usage": usage_counts(answer),
                "system_fingerprint": None,
            }

        return await respond_with_generation(
            request,
            start,
            self._service.timeouts,
            events=events if body.stream else None,
            collect=collect,
        )


class CompletionEvents(AnswerEvents):
    """text_completion events. `echoes`: what comes before each choice's text."""

    def __init__(self, answer: Answer, chunks: CompletionChunks, echoes: Sequence[str] = ()) -> None:
        super().__init__(answer)
        self._chunks = chunks
        self._echoes = dict(enumerate(echoes))

    def render(self, delta: ChoiceDelta) -> bytes:
        choice, text, ended = delta
        entries = choice.take_logprobs(text)
        text = self._echoes.pop(choice.index, "") + text
        data = b""
        if text or entries:
            logprobs = completion_logprobs(entries) if entries is not None else None
            data = self._chunks.content(choice.index, text, logprobs)
        return data + self._chunks.finish(choice) if ended else data

    def end(self) -> bytes:
        return self._chunks.last(usage_counts(self._answer))


@dataclass(slots=True)
class CompletedText:
    """One choice, complete."""

    choice: Choice
    parts: list[str]
    entries: list[TokenLogprob]

    def rendered(self, index: int, logprobs: bool) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(self.parts),
            "logprobs": completion_logprobs(self.entries) if logprobs else None,
            "finish_reason": self.choice.finish_reason,
        }

    def mean_logprob(self) -> float:
        return sum(entry.logprob for entry in self.entries) / max(len(self.entries), 1)


async def collect_texts(answer: Answer, echoes: Sequence[str] = ()) -> list[CompletedText]:
    def begun(choice: Choice) -> CompletedText:
        return CompletedText(choice, list(echoes[choice.index : choice.index + 1]), [])

    texts = [begun(choice) for choice in answer.choices]
    while (delta := await answer.next()) is not None:
        choice, text, _ = delta
        if texts[choice.index].choice is not choice:
            texts[choice.index] = begun(choice)
        texts[choice.index].parts.append(text)
        texts[choice.index].entries.extend(choice.take_logprobs(text) or ())
    return texts


def best_texts(texts: Sequence[CompletedText], of: int, n: int) -> list[CompletedText]:
    """Of each prompt's `of` texts the `n` with the highest log-probability per token, best first."""
    if of == n:
        return list(texts)
    prompts = [texts[at : at + of] for at in range(0, len(texts), of)]
    return [one for group in prompts for one in sorted(group, key=CompletedText.mean_logprob, reverse=True)[:n]]
