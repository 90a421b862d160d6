"""From a validated completions request to a started answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llmops.gateway.answers.answer import Answer
from llmops.gateway.answers.choice import Choice, LogprobLog
from llmops.gateway.answers.guided.schemas import SchemaLimits
from llmops.gateway.answers.guided.structured import enforced, guide_field, guide_of, must_hold, work_of
from llmops.gateway.answers.sampling import (
    Endings,
    bad_words_of,
    check_capabilities,
    check_guide,
    check_logprobs,
    endings_of,
    output_length,
    sampling_of,
)
from llmops.gateway.answers.service import Service, admitted, open_streams
from llmops.gateway.answers.sizes import check_ids, check_length, check_text
from llmops.gateway.errors import InvalidRequestError, UnsupportedError, missing
from llmops.gateway.fleet.serving import ServedModel
from llmops.gateway.http.context import RequestContext
from llmops.gateway.messages import EngineRequest, Grant, Guide
from llmops.gateway.observability.metrics import Meter
from llmops.gateway.openai.completions import CompletionRequest
from llmops.gateway.settings import RequestLimits

DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


def check_completion(body: CompletionRequest, model: ServedModel) -> None:
    """The checks that do not need the prompts' tokens."""
    if body.prompt is None or body.prompt == []:
        raise missing("prompt")
    if body.echo and body.logprobs is not None:
        raise UnsupportedError(
            "echo together with logprobs needs the prompt's log-probabilities, which this engine does not give; "
            "leave out one of them.",
            param="echo",
        )
    if body.suffix:
        raise UnsupportedError("suffix is not supported; leave it out.", param="suffix")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options need stream to be true; set it, or leave stream_options out.", param="stream_options"
        )
    check_capabilities(body, model.card)
    check_logprobs(body.logprobs is not None, body.logprobs or 0, model.card, "logprobs")
    _check_best_of(body, model)


def _check_best_of(body: CompletionRequest, model: ServedModel) -> None:
    n, best_of = body.n or 1, sequences_of(body)
    if best_of < n:
        raise InvalidRequestError("best_of must not be less than n; raise it to n.", param="best_of")
    if best_of == n:
        return
    if body.stream:
        raise InvalidRequestError(
            "best_of chooses among whole answers; it cannot be streamed; set stream to false.", param="best_of"
        )
    can = model.card.capabilities
    if best_of > can.n or not can.logprobs:
        most = f"is at most {can.n}" if can.logprobs else "needs log-probabilities, which are not known"
        raise UnsupportedError(f"best_of {most} with target {model.card.target}.", param="best_of")


def sequences_of(body: CompletionRequest) -> int:
    """How many answers are generated per prompt."""
    return body.best_of or body.n or 1


async def start_completion(
    service: Service, body: CompletionRequest, model: ServedModel, answer_id: str, context: RequestContext
) -> Answer:
    """Submit one engine request per prompt. Choices are numbered prompt by prompt.

    Raises what is wrong with it, or UnavailableError when too many wait already.
    """
    prompts = prompts_of(body, service.limits)

    async def start(leave: Callable[[], None], meter: Meter) -> Answer:
        return await _start(service, body, model, answer_id, context, prompts, leave, meter)

    return await admitted(service, model, len(prompts) * sequences_of(body), context, start)


async def _start(
    service: Service,
    body: CompletionRequest,
    model: ServedModel,
    answer_id: str,
    context: RequestContext,
    prompts: Sequence[Prompt],
    leave: Callable[[], None],
    meter: Meter,
) -> Answer:
    def prepare() -> tuple[list[list[int]], Guide | None]:
        return [encode(model, one, body) for one in prompts], _guide(body, model, service)

    encoded, guide = await service.text_threads.run(prepare, context.size + work_of(body), context.caller.share)
    context.mark("tokenise")
    endings = endings_of(body, model.card, service.limits)
    requests = _engine_requests(body, model, encoded, endings, answer_id, service, guide, context)
    if context.grant is not None:
        requests = await _granted(context.grant, requests, model.name)

    def choice(index: int) -> Choice:
        request = requests[index // requests[0].n]
        return Choice(
            index,
            model.tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens is not False),
            max_tokens=request.max_tokens,
            end_ids=frozenset(endings.end_ids),
            stops=endings.stops,
            logprobs=LogprobLog(model.tokenizer.token_bytes) if request.logprobs else None,
        )

    choices = [choice(index) for index in range(len(requests) * requests[0].n)]
    prompt_tokens, fresh = sum(map(len, encoded)), None if body.stream else choice
    stream = await open_streams(model.engine, requests)
    context.mark("submit")
    meter.submitted(prompt_tokens, len(choices))
    if context.tally is not None:
        context.tally.begin(model.name, answer_id, prompt_tokens)
    return Answer(stream, choices, meter, service.timeouts, prompt_tokens, leave, context, fresh)


async def _granted(grant: Grant, requests: list[EngineRequest], model: str) -> list[EngineRequest]:
    """With answers as long as the caller can pay for. Without `max_tokens` they are short: a bound as well."""
    prompt, most = sum(len(one.input_ids) for one in requests), sum(one.n * one.max_tokens for one in requests)
    allowed = await grant.tokens(model, prompt, most, sum(one.n for one in requests))
    if allowed == most:
        return requests
    return [replace(one, max_tokens=max(one.max_tokens * allowed // most, 1)) for one in requests]


def _guide(body: CompletionRequest, model: ServedModel, service: Service) -> Guide | None:
    guide = guide_of(body, SchemaLimits.of(service.limits))
    if guide is None:
        return None
    field = guide_field(body)
    check_guide(guide, model.card, field)
    return enforced(guide, model.card.capabilities.guided, must_hold(body), field)


def _engine_requests(
    body: CompletionRequest,
    model: ServedModel,
    prompts: list[list[int]],
    endings: Endings,
    answer_id: str,
    service: Service,
    guide: Guide | None,
    context: RequestContext,
) -> list[EngineRequest]:
    sampling = sampling_of(body, model.card)
    bad_words = bad_words_of(body, model.tokenizer, service.limits)
    default = min(DEFAULT_MAX_TOKENS, service.default_tokens or DEFAULT_MAX_TOKENS)
    return [
        EngineRequest(
            request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{at}",
            input_ids=ids,
            max_tokens=output_length(body.max_tokens, len(ids), model.card, default=default, param="prompt"),
            sampling=sampling,
            n=sequences_of(body),
            min_tokens=body.min_tokens or 0,
            end_ids=endings.end_ids,
            logprobs=body.logprobs is not None or sequences_of(body) > (body.n or 1),
            top_logprobs=body.logprobs or 0,
            bad_words=bad_words,
            guide=guide,
            caller=context.caller.share,
            cache_salt=service.cache_salt(context.caller.share),
            extras=model.extras,
            turn=context.turn,
            whole=not body.stream,
            trace=context.onward,
        )
        for at, ids in enumerate(prompts)
    ]


def prompts_of(body: CompletionRequest, limits: RequestLimits) -> list[Prompt]:
    """The prompts as a list, from any of the four forms. Raises InvalidRequestError for too many or too long ones."""
    prompt = body.prompt
    assert prompt is not None
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
    if len(prompts) > limits.prompts:
        raise InvalidRequestError(f"At most {limits.prompts} prompts are allowed.", param="prompt")
    check_length(sum(len(one) for one in prompts if isinstance(one, str)), limits, "prompt")
    return prompts


async def echoes_of(
    body: CompletionRequest, model: ServedModel, service: Service, context: RequestContext
) -> list[str]:
    """The text before each choice's own: its prompt if `echo` is set."""
    if not body.echo:
        return []
    prompts = prompts_of(body, service.limits)
    texts = await service.text_threads.run(
        lambda: [_echo(model, prompt) for prompt in prompts], context.size, context.caller.share
    )
    return [text for text in texts for _ in range(sequences_of(body))]


def _echo(model: ServedModel, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer.decode(_checked_ids(model, prompt), skip_special_tokens=False)


def encode(model: ServedModel, prompt: Prompt, body: CompletionRequest) -> list[int]:
    if not isinstance(prompt, str):
        return _checked_ids(model, prompt)
    check_text(prompt, model, "prompt")
    ids = model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
    return ids or [_start_token(model)]


def _checked_ids(model: ServedModel, ids: list[int]) -> list[int]:
    if not ids:
        raise InvalidRequestError("A prompt must not be empty.", param="prompt")
    check_ids(ids, model, "prompt")
    largest, size = max(ids), model.card.vocab_size
    if largest >= size:
        raise InvalidRequestError(f"There is no token {largest}: the vocabulary has {size}.", param="prompt")
    return ids


def _start_token(model: ServedModel) -> int:
    """What an empty prompt begins with."""
    if model.card.bos_id is None:
        raise InvalidRequestError("A prompt must not be empty.", param="prompt")
    return model.card.bos_id
