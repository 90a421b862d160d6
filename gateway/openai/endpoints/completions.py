"""POST /v1/completions"""

from __future__ import annotations

import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.http.body import parse, read_body
from llmops.gateway.http.context import RequestContext, context_of
from llmops.gateway.messages import EngineRequest
from llmops.gateway.openai.answer import Advance, Answer
from llmops.gateway.openai.choice import Choice, LogprobLog
from llmops.gateway.openai.chunks import CompletionChunks, completion_logprobs, usage
from llmops.gateway.openai.endpoints.common import AnswerEvents, ignored_fields, respond
from llmops.gateway.openai.sampling import (
    Endings,
    check_capabilities,
    check_guide,
    check_logprobs,
    endings_of,
    output_length,
    sampling_of,
)
from llmops.gateway.openai.schemas import SchemaLimits
from llmops.gateway.openai.service import Service, open_streams
from llmops.gateway.openai.structured import guide_field, guide_of
from llmops.gateway.openai.types.completions import CompletionRequest
from llmops.gateway.serving import ServedModel

IGNORED = frozenset({"priority", "cache_salt", "include_stop_str_in_output"})
DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


class Completions:
    """The endpoint; `handle` is the route. Choices are numbered prompt by prompt, as OpenAI does."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request) -> Response:
        context = context_of(request)
        body = parse(CompletionRequest, await read_body(request, self._service.limits.body_bytes))
        context.mark("parse")
        model = self._service.models.get(body.model)
        self._check(body, model)
        context.ignored = ignored_fields(body, IGNORED)
        answer_id, created = "cmpl-" + secrets.token_hex(12), int(time.time())

        def events(answer: Answer) -> AnswerEvents:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            chunks = CompletionChunks(answer_id, body.model, created, len(answer.choices), include_usage=include_usage)
            return CompletionEvents(answer, chunks)

        async def collect(answer: Answer) -> dict[str, Any]:
            return {
                "id": answer_id,
                "object": "text_completion",
                "created": created,
                "model": body.model,
                "choices": await collect_choices(answer),
                "usage": usage(answer.prompt_tokens, answer.completion_tokens),
                "system_fingerprint": None,
            }

        return await respond(
            request,
            lambda: self._start(body, model, answer_id, context),
            events=events if body.stream else None,
            collect=collect,
        )

    def _check(self, body: CompletionRequest, model: ServedModel) -> None:
        if body.prompt is None or body.prompt == []:
            raise InvalidRequestError("Missing required parameter: 'prompt'.", param="prompt")
        if body.echo:
            raise InvalidRequestError("echo is not supported.", param="echo")
        if body.suffix:
            raise InvalidRequestError("suffix is not supported.", param="suffix")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise InvalidRequestError("best_of must be equal to n.", param="best_of")
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError("stream_options need stream to be true.", param="stream_options")
        check_capabilities(body, model.card)
        check_logprobs(body.logprobs is not None, body.logprobs or 0, model.card, "logprobs")

    async def _start(
        self, body: CompletionRequest, model: ServedModel, answer_id: str, context: RequestContext
    ) -> Answer:
        service = self._service
        prompts = prompts_of(body, service.limits.prompts)
        size = sum(map(len, prompts))
        encoded = await service.workers.run(lambda: [encode(model, one, body) for one in prompts], size)
        context.mark("tokenise")
        guide = guide_of(body, SchemaLimits(size=service.limits.schema_bytes))
        check_guide(guide, model.card, guide_field(body))
        endings = endings_of(body, model.card, service.limits)
        requests = engine_requests(body, model, encoded, endings, answer_id)
        choices = [
            Choice(
                at * request.n + sequence,
                model.tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens is not False),
                max_tokens=request.max_tokens,
                end_ids=frozenset(endings.end_ids),
                stops=endings.stops,
                logprobs=LogprobLog(model.tokenizer.token_bytes) if request.logprobs else None,
            )
            for at, request in enumerate(requests)
            for sequence in range(request.n)
        ]
        prompt_tokens = sum(map(len, encoded))
        stream = await open_streams(model.engine, requests)
        context.mark("submit")
        meter = service.metrics.meter(model.name, context.started, prompt_tokens)
        return Answer(stream, choices, meter, service.timeouts, prompt_tokens)


def engine_requests(
    body: CompletionRequest, model: ServedModel, prompts: list[list[int]], endings: Endings, answer_id: str
) -> list[EngineRequest]:
    """One per prompt."""
    sampling = sampling_of(body, model.card)
    return [
        EngineRequest(
            request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{at}",
            input_ids=ids,
            max_tokens=output_length(body.max_tokens, len(ids), model.card, default=DEFAULT_MAX_TOKENS, param="prompt"),
            sampling=sampling,
            n=body.n or 1,
            min_tokens=body.min_tokens or 0,
            end_ids=endings.end_ids,
            logprobs=body.logprobs is not None,
            lora_id=model.lora_id,
        )
        for at, ids in enumerate(prompts)
    ]


def prompts_of(body: CompletionRequest, limit: int) -> list[Prompt]:
    """The prompts as a list, whichever of the four forms came."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    assert prompt is not None
    prompts = [prompt] if isinstance(prompt[0], int) else list(prompt)
    if len(prompts) > limit:
        raise InvalidRequestError(f"At most {limit} prompts are allowed.", param="prompt")
    return prompts  # type: ignore[return-value]


def encode(model: ServedModel, prompt: Prompt, body: CompletionRequest) -> list[int]:
    if isinstance(prompt, str):
        ids = model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
        return ids or [_start_token(model)]
    if not prompt:
        raise InvalidRequestError("A prompt must not be empty.", param="prompt")
    largest, size = max(prompt), model.card.vocab_size
    if largest >= size:
        raise InvalidRequestError(f"There is no token {largest}: the vocabulary has {size}.", param="prompt")
    return prompt


def _start_token(model: ServedModel) -> int:
    """What an empty prompt begins with."""
    if model.card.bos_id is None:
        raise InvalidRequestError("A prompt must not be empty.", param="prompt")
    return model.card.bos_id


class CompletionEvents(AnswerEvents):
    """text_completion events."""

    def __init__(self, answer: Answer, chunks: CompletionChunks) -> None:
        super().__init__(answer)
        self._chunks = chunks

    def render(self, advance: Advance) -> bytes:
        choice, text, ended = advance
        entries = choice.take_logprobs(text)
        data = b""
        if text or entries:
            logprobs = completion_logprobs(entries) if entries is not None else None
            data = self._chunks.content(choice.index, text, logprobs)
        return data + self._chunks.finish(choice) if ended else data

    def end(self) -> bytes:
        return self._chunks.last(self._answer.prompt_tokens, self._answer.completion_tokens)


async def collect_choices(answer: Answer) -> list[dict[str, Any]]:
    """All choices, complete."""
    texts: list[list[str]] = [[] for _ in answer.choices]
    entries: list[list] = [[] for _ in answer.choices]
    while (advance := await answer.next()) is not None:
        choice, text, _ = advance
        texts[choice.index].append(text)
        entries[choice.index].extend(choice.take_logprobs(text) or ())
    return [
        {
            "index": choice.index,
            "text": "".join(texts[choice.index]),
            "logprobs": completion_logprobs(entries[choice.index]) if choice.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
        }
        for choice in answer.choices
    ]
