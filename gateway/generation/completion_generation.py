"""The start of an answer to a completions request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmops.gateway.errors import InvalidRequestError, UnsupportedError, missing_parameter
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.app_state import Generation
from llmops.gateway.generation.choice import Choice
from llmops.gateway.generation.prompt_limits import check_prompt_characters, check_prompt_text, check_prompt_tokens
from llmops.gateway.generation.sampling import (
    check_capabilities,
    check_guide,
    check_logprobs,
    check_prompt_logprobs,
    resolve_max_tokens,
    resolve_samplings,
    resolve_stop_conditions,
    tokenize_bad_words,
)
from llmops.gateway.generation.structured.request_guide import (
    GUIDE_FIELDS,
    compile_guide,
    guide_field,
    parse_guide,
    requires_strict_guide,
)
from llmops.gateway.generation.structured.schema_validation import SchemaLimits
from llmops.gateway.interfaces import EngineRequest, Guide, QuotaReservation, SamplingParams
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.request_fields import CompletionRequest
from llmops.gateway.settings import RequestLimits
from llmops.gateway.text.text_thread_pool import THREAD_CHARACTERS

#: Maximum tokens of an answer whose request sets no maximum, as in OpenAI's API.
DEFAULT_MAX_TOKENS = 16

PromptInput = str | list[int]
BadWords = tuple[tuple[int, ...], ...]


def validate_completion(body: CompletionRequest, model: GenerativeModel) -> None:
    """Raise InvalidRequestError for a completion request that cannot be served.

    Only properties that are known without the prompts are checked.
    """
    if body.prompt is None or body.prompt == []:
        raise missing_parameter("prompt")
    unsupported = {"echo": body.echo, "suffix": body.suffix, "best_of": body.best_of not in (None, body.n or 1)}
    for field, is_used in unsupported.items():
        if is_used:
            raise UnsupportedError(f"{field} is not supported; leave it out.", param=field)
    check_capabilities(body, model.card)
    if body.logprobs is not None:
        check_logprobs(body.logprobs, model.card, "logprobs")


class CompletionGeneration(Generation[CompletionRequest]):
    """A completions request on its way to the engine."""

    async def start(self) -> Answer:
        """Submit one engine request per prompt, and return the answer.

        Choices are numbered prompt by prompt.

        Raises:
            InvalidRequestError: A prompt cannot be used.
            UnavailableError: Too many requests are waiting.
        """
        state, body, model, context = self.state, self.body, self.model, self.context
        prompts = parse_prompts(body, state.limits)
        with self.admitted(len(prompts) * (body.n or 1)):
            safety = state.safety

            def prepare() -> tuple[list[list[int]], list[str], Guide | None, BadWords]:
                encoded = [tokenize_prompt(model, one, body) for one in prompts]
                texts = [_prompt_text(model, one) if safety is not None else "" for one in prompts]
                bad_words = tokenize_bad_words(body.bad_words, model.tokenizer, state.limits) if body.bad_words else ()
                return encoded, texts, self._guide(), bad_words

            # A guide is always compiled on a text thread.
            size = context.work_bytes + (0 if GUIDE_FIELDS.isdisjoint(body.model_fields_set) else THREAD_CHARACTERS)
            encoded, texts, guide, bad_words = await state.text_threads.run(prepare, size, context.caller.share)
            context.mark("tokenise")
            if body.prompt_logprobs is not None:
                check_prompt_logprobs(body.prompt_logprobs, sum(map(len, encoded)), model.card)
            stop_conditions = resolve_stop_conditions(body, model.card, state.limits)
            names = [self.answer_id] if len(encoded) == 1 else [f"{self.answer_id}-{at}" for at in range(len(encoded))]
            samplings = resolve_samplings(body, model.card, len(encoded))
            requests = [
                self._engine_request(
                    name, ids, end_ids=stop_conditions.end_ids, guide=guide, bad_words=bad_words, sampling=sampling
                )
                for name, ids, sampling in zip(names, encoded, samplings, strict=True)
            ]
            if context.reservation is not None:
                requests = await _reserve_tokens(context.reservation, requests, model.name)
            if safety is not None:
                await safety.check_prompt(texts, context.caller, end_user=context.end_user)

            def make_choice(index: int) -> Choice:
                at = index // requests[0].n
                request = requests[at]
                return Choice(
                    index,
                    model.tokenizer.detokenizers.make(body.skip_special_tokens is not False),
                    max_tokens=request.max_tokens,
                    end_ids=frozenset(stop_conditions.end_ids),
                    stops=stop_conditions.stops,
                    logprobs=self.logprob_buffer(len(requests) * request.n) if request.logprobs else None,
                    guard=safety.guard(context.caller, texts[at], context.end_user) if safety is not None else None,
                )

            return await self.submit(requests, make_choice)

    def _guide(self) -> Guide | None:
        guide = parse_guide(self.body, SchemaLimits.of(self.state.limits))
        if guide is None:
            return None
        field = guide_field(self.body)
        check_guide(guide, self.model.card, field, self.body)
        return compile_guide(guide, self.model.card.capabilities.guided, requires_strict_guide(self.body), field)

    def _engine_request(
        self,
        request_id: str,
        input_ids: list[int],
        *,
        end_ids: tuple[int, ...],
        guide: Guide | None,
        bad_words: BadWords,
        sampling: SamplingParams,
    ) -> EngineRequest:
        state, body, model, context = self.state, self.body, self.model, self.context
        default = min(DEFAULT_MAX_TOKENS, state.default_tokens or DEFAULT_MAX_TOKENS)
        max_tokens = resolve_max_tokens(body.max_tokens, len(input_ids), model.card, default=default, param="prompt")
        if context.degraded is not None:
            max_tokens = self.limit_degraded(context.degraded, len(input_ids), max_tokens)
        return EngineRequest(
            request_id=request_id,
            input_ids=input_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            n=body.n or 1,
            min_tokens=body.min_tokens or 0,
            end_ids=end_ids,
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
            prompt_logprobs=body.prompt_logprobs,
            bad_words=bad_words,
            guide=guide,
            caller=context.caller.share,
            cache_salt=state.cache_salt(context.caller.share),
            extras=model.extras,
            turn=context.scheduling,
            whole=not body.stream,
            trace=context.traceparent,
        )


async def _reserve_tokens(
    reservation: QuotaReservation, requests: list[EngineRequest], model: str
) -> list[EngineRequest]:
    """Reserve tokens, and return the requests with answers as long as the quota allows."""
    prompt, most = sum(len(one.input_ids) for one in requests), sum(one.n * one.max_tokens for one in requests)
    allowed = await reservation.tokens(model, prompt, most, sum(one.n for one in requests))
    if allowed == most:
        return requests
    return [replace(one, max_tokens=max(one.max_tokens * allowed // most, 1)) for one in requests]


def parse_prompts(body: CompletionRequest, limits: RequestLimits) -> list[PromptInput]:
    """Return the prompts of a request as a list, from any of the four forms of the field.

    Raises:
        InvalidRequestError: The prompts are too many or too long.
    """
    prompt = body.prompt
    assert prompt is not None
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
    if len(prompts) > limits.prompts:
        raise InvalidRequestError(
            f"At most {limits.prompts} prompts are allowed in one request; send fewer.", param="prompt"
        )
    check_prompt_characters(sum(len(one) for one in prompts if isinstance(one, str)), limits, "prompt")
    return prompts


def _prompt_text(model: GenerativeModel, prompt: PromptInput) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer.decode(_check_token_ids(model, prompt), skip_special_tokens=False)


def tokenize_prompt(model: GenerativeModel, prompt: PromptInput, body: CompletionRequest) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        InvalidRequestError: The tokens or the text cannot be used.
    """
    if not isinstance(prompt, str):
        return _check_token_ids(model, prompt)
    check_prompt_text(prompt, model, "prompt")
    ids = model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
    return ids or [_start_token(model)]


def _check_token_ids(model: GenerativeModel, ids: list[int]) -> list[int]:
    if not ids:
        raise InvalidRequestError("A prompt must not be empty; send at least one token.", param="prompt")
    check_prompt_tokens(ids, model, "prompt")
    largest, size = max(ids), model.card.vocab_size
    if largest >= size:
        raise InvalidRequestError(f"Token {largest} does not exist; send token ids below {size}.", param="prompt")
    return ids


def _start_token(model: GenerativeModel) -> int:
    """Return the id of the token that stands for an empty prompt.

    Raises:
        InvalidRequestError: The model has no such token.
    """
    if model.card.bos_id is None:
        raise InvalidRequestError("A prompt must not be empty; send some text.", param="prompt")
    return model.card.bos_id
