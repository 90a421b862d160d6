"""The endpoint POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
    echoed_prompts,
    sequences_per_prompt,
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
        echoes: list[str] = []

        async def start() -> Answer:
            echoes.extend(await echoed_prompts(body, model, self._service, context))
            return await CompletionGeneration(self._service, body, model, answer_id, context).start()

        async def collect(answer: Answer) -> dict[str, Any]:
            texts = await collect_texts(answer, echoes)
            generated, n = sequences_per_prompt(body), body.n or 1
            choices = [
                text.rendered(index, body.logprobs is not None)
                for index, text in enumerate(best_texts(texts, generated, n))
            ]
            if body.prompt_logprobs is not None:
                for start in range(0, len(texts), generated):
                    own = [text.choice for text in texts[start : start + generated]]
                    rendered = await render_prompt_logprobs(own, body.prompt_logprobs, self._service, model, context)
                    for choice in choices[start // generated * n :][:n]:
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
            start,
            self._service.timeouts,
            events=partial(CompletionEvents, answer_id, body, created, echoes) if body.stream else None,
            collect=collect,
        )


class CompletionEvents(AnswerEvents):
    """The event stream of a text completion.

    The text of each choice starts with the entry of `echoes` for the choice: its prompt, if the
    request has `echo`.
    """

    def __init__(
        self, answer_id: str, body: CompletionRequest, created: int, echoes: Sequence[str], answer: Answer
    ) -> None:
        super().__init__(answer)
        self._chunks = CompletionChunks(answer_id, body, created, len(answer.choices))
        self._echoes = dict(enumerate(echoes))

    def render(self, delta: ChoiceDelta) -> bytes:
        """Return the chunks for one piece of output, encoded."""
        choice, text, finished = delta
        entries = choice.take_logprobs(text)
        text = self._echoes.pop(choice.index, "") + text
        data = b""
        if text or entries:
            logprobs = completion_logprobs(entries) if entries is not None else None
            data = self._chunks.content(choice.index, text, logprobs)
        return data + self._chunks.finish(choice) if finished else data

    def end(self) -> bytes:
        """Return the events that end the stream, encoded."""
        return self._chunks.last(self._answer)


@dataclass(slots=True)
class CompletedText:
    """The collected text of a choice.

    Attributes:
        choice: The choice.
        parts: The pieces of text, in order; first the echoed prompt, if there is one.
        entries: The log-probability of each token.
    """

    choice: Choice
    parts: list[str]
    entries: list[TokenLogprob]

    def rendered(self, index: int, logprobs: bool) -> dict[str, Any]:
        """Return the choice as a JSON object."""
        return {
            "index": index,
            "text": "".join(self.parts),
            "logprobs": completion_logprobs(self.entries) if logprobs else None,
            "finish_reason": self.choice.finish_reason,
        }

    def mean_logprob(self) -> float:
        """Return the mean log-probability of the choice's tokens."""
        return sum(entry.logprob for entry in self.entries) / max(len(self.entries), 1)


async def collect_texts(answer: Answer, echoes: Sequence[str] = ()) -> list[CompletedText]:
    """Read an answer to its end and return the texts of its choices.

    `echoes` has the prompt with which the text of each choice begins, by the choice's index.
    """

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


def best_texts(texts: Sequence[CompletedText], generated: int, n: int) -> list[CompletedText]:
    """Return the `n` best texts of each prompt, best first.

    Args:
        texts: The texts of all prompts, `generated` texts per prompt.
        generated: The number of texts per prompt.
        n: The number of texts to return per prompt. The best texts have the highest mean
            log-probability per token.
    """
    if generated == n:
        return list(texts)
    prompts = [texts[start : start + generated] for start in range(0, len(texts), generated)]
    return [text for group in prompts for text in sorted(group, key=CompletedText.mean_logprob, reverse=True)[:n]]
