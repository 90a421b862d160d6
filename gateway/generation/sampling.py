"""Sampling parameters, stop conditions and the maximum number of tokens of a request.

The module also checks that the engine supports these parameters.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from llmops import contract
from llmops.gateway.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from llmops.gateway.generation.prompt_limits import context_length_error
from llmops.gateway.interfaces import Capabilities, Guide, ModelMetadata, SamplingParams
from llmops.gateway.schemas.request_fields import SamplingFields
from llmops.gateway.settings import RequestLimits
from llmops.gateway.text.tokenizer import TextTokenizer

T = TypeVar("T")

#: Fields of a request by the contract's tensor: an engine names the tensor in an error, and clients
#: know the field.
REQUEST_FIELD_BY_TENSOR = {
    contract.EMBEDDING_BIAS.name: "logit_bias",
    contract.RETURN_LOG_PROBS.name: "logprobs",
    contract.PROMPT_LOG_PROBS.name: "prompt_logprobs",
    contract.NUM_RETURN_SEQUENCES.name: "n",
    contract.RUNTIME_TOP_K.name: "top_k",
    contract.RUNTIME_TOP_P.name: "top_p",
    contract.RUNTIME_MIN_P.name: "min_p",
    contract.REQUEST_OUTPUT_LEN.name: "max_tokens",
    contract.INPUT_IDS.name: "messages",
    contract.INPUT_LENGTHS.name: "messages",
    contract.BAD_WORDS_LIST.name: "bad_words",
    contract.STOP_WORDS_LIST.name: "stop_token_ids",
    contract.END_ID.name: "ignore_eos",
    contract.TEMPERATURE.name: "temperature",
    contract.MIN_TOKENS.name: "min_tokens",
    contract.GUIDE.name: "response_format",
    contract.GUIDE_TYPE.name: "response_format",
    contract.LORA_TASK_ID.name: "model",
}

#: Fields that not every engine supports: the needed capability, and the values that need no
#: capability.
_CAPABILITIES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "logit_bias": ("logit_bias", ({},)),
    "min_p": ("min_p", (0.0,)),
    "repetition_penalty": ("penalties", (1.0,)),
    "presence_penalty": ("penalties", (0.0,)),
    "frequency_penalty": ("penalties", (0.0,)),
    "bad_words": ("bad_words", ([],)),
    "prompt_logprobs": ("prompt_logprobs", ()),
    "seed": ("seed", ()),
}

#: Sentences that name engines which support a field, for the errors of other engines.
_HINTS = {
    "logit_bias": " An engine of target tensorrt on NVIDIA's backend takes it.",
    "bad_words": " An engine of target tensorrt on NVIDIA's backend takes it.",
    "prompt_logprobs": (
        " An engine of target pytorch without speculation takes it, if its --max-num-tokens times the vocabulary is at "
        "most 2^29."
    ),
}
#: Maximum values of `prompt_logprobs` in one answer: prompt tokens times alternatives. An answer is
#: rendered whole, and each value takes about 60 bytes of JSON.
MAX_PROMPT_LOGPROBS = 100_000
#: Maximum logits of one prompt, tokens times the vocabulary. TensorRT-LLM keeps them on the GPU as
#: float32 numbers, in memory that it has not reserved (_torch/pyexecutor/llm_request.py,
#: LogitsStorage).
MAX_PROMPT_LOGITS = 2**28


@dataclass(frozen=True, slots=True)
class StopConditions:
    """The conditions other than length that end an answer.

    Attributes:
        end_ids: Tokens that end the text.
        stops: Texts that end the text.
    """

    end_ids: tuple[int, ...]
    stops: tuple[str, ...]


#: Sentences that name an engine with more alternatives to the chosen token: for errors of other
#: targets, and of other engines of target pytorch.
_ALTERNATIVES = "Target pytorch has more: from TensorRT-LLM 1.3 on, without speculation."
_ALTERNATIVES_OF_PYTORCH = (
    "TensorRT-LLM 1.3 has more without speculation, and 1.2 with `build --set llm.sampler_type=TorchSampler`."
)


def check_capabilities(body: SamplingFields, card: ModelMetadata) -> None:
    """Check that the model's engine supports all fields of a request. Errors name the field.

    Raises:
        UnsupportedError: The engine does not support a field.
        InvalidRequestError: A field cannot be combined with `stream`.
    """
    can = card.capabilities
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options need a stream; set stream to true, or leave stream_options out.", param="stream_options"
        )
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError(
            "prompt_logprobs are not sent in streams; set stream to false, or leave prompt_logprobs out.",
            param="prompt_logprobs",
        )
    if not _CAPABILITIES.keys().isdisjoint(body.model_fields_set):
        for field, (capability, neutral) in _CAPABILITIES.items():
            if getattr(body, field) not in (None, *neutral) and not getattr(can, capability):
                raise _unsupported(field, card)
    if (body.n or 1) > can.n:
        raise UnsupportedError(f"n is at most {can.n} with target {card.target}; lower n.", param="n")


def check_logprobs(top: int, card: ModelMetadata, top_field: str) -> None:
    """Check that the engine can return log-probabilities, with `top` alternatives.

    Raises:
        UnsupportedError: The engine cannot return so many.
    """
    if not card.capabilities.logprobs:
        raise _unsupported("logprobs", card)
    if top > card.capabilities.top_logprobs:
        can: Capabilities = card.capabilities
        known = ": only the chosen token's log-probability is known. " if can.logprobs else ". "
        hint = _ALTERNATIVES_OF_PYTORCH if card.target == "pytorch" else _ALTERNATIVES
        raise UnsupportedError(
            f"{top_field} is at most {can.top_logprobs} with target {card.target}{known}{hint}",
            param=top_field,
        )


def check_guide(guide: Guide, card: ModelMetadata, field: str, body: SamplingFields) -> None:
    """Raise UnsupportedError if the engine does not support `guide` with the fields of `body`.

    NVIDIA's C++ backend ends all requests when an answer continues after its grammar's end (1.2.1
    batch_manager/guidedDecoder.cpp, build: xgrammar then has no token mask). The engine models of
    this project refuse such requests themselves.
    """
    if guide.kind not in card.capabilities.guided:
        raise UnsupportedError(
            f"{field}: target {card.target} does not support {guide.kind} grammars; leave {field} out.", param=field
        )
    if contract.STEP_TRANSPORT not in card.transports:
        for name in ("ignore_eos", "min_tokens"):
            if getattr(body, name):
                raise UnsupportedError(f"{name}: {field} decides where the answer ends; leave {name} out.", param=name)


def check_prompt_logprobs(asked: int, prompt_tokens: int, card: ModelMetadata) -> None:
    """Raise InvalidRequestError for too many log-probabilities of the prompt."""
    most = MAX_PROMPT_LOGITS // card.vocab_size
    if prompt_tokens > most:
        raise InvalidRequestError(
            f"prompt_logprobs take at most {most} prompt tokens with this model, and the prompt has {prompt_tokens}. "
            "Shorten the prompt.",
            param="prompt_logprobs",
        )
    if prompt_tokens * (asked + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs of {asked} for {prompt_tokens} prompt tokens are more than "
            f"{MAX_PROMPT_LOGPROBS} values. Lower prompt_logprobs, or shorten the prompt.",
            param="prompt_logprobs",
        )


def resolve_sampling(body: SamplingFields, card: ModelMetadata) -> SamplingParams:
    """Return the sampling parameters: from the request, else the model's defaults, else OpenAI's.

    All parameters are sent, because engines have their own defaults.
    """
    own, can = card.sampling, card.capabilities
    temperature = first_not_none(body.temperature, own.temperature, 1.0)
    top_p = first_not_none(body.top_p, own.top_p, 1.0)
    top_k = max(first_not_none(body.top_k, own.top_k, 0), 0)
    return SamplingParams(
        temperature=0.0 if top_p == 0 or top_k == 1 else temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=first_not_none(body.min_p, own.min_p if can.min_p else None, 0.0),
        repetition_penalty=first_not_none(
            body.repetition_penalty, own.repetition_penalty if can.penalties else None, 1.0
        ),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        # Without a seed, engines would return the same "random" answer each time.
        seed=(secrets.randbits(63) if body.seed is None else body.seed % 2**64) if can.seed else None,
        logit_bias=_logit_bias(body.logit_bias, card) if body.logit_bias else None,
    )


def resolve_samplings(body: SamplingFields, card: ModelMetadata, prompts: int) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt, which share one `logit_bias`.

    Without a seed, each prompt has its own, so that equal prompts have different answers.
    """
    first = resolve_sampling(body, card)
    if body.seed is not None or first.seed is None:
        return [first] * prompts
    return [first, *(replace(first, seed=secrets.randbits(63)) for _ in range(prompts - 1))]


def first_not_none(requested: T | None, model_default: T | None, fallback: T) -> T:
    """Return the first argument that is not None."""
    return requested if requested is not None else model_default if model_default is not None else fallback


def resolve_stop_conditions(body: SamplingFields, card: ModelMetadata, limits: RequestLimits) -> StopConditions:
    """Return the end tokens and stop strings of a request.

    Raises:
        InvalidRequestError: The stop conditions cannot be used, or not together with `min_tokens`.
    """
    ids = () if body.ignore_eos else card.end_ids
    if body.min_tokens and contract.STEP_TRANSPORT not in card.transports:
        # NVIDIA's C++ backend bans one end token until min_tokens. The model's other end tokens can
        # be banned as bad words on engines that support those; `stop_token_ids` cannot.
        if body.stop_token_ids:
            raise UnsupportedError(
                f"min_tokens does not hold for stop_token_ids with target {card.target}; leave one of the two out.",
                param="min_tokens",
            )
        if len(ids) > 1 and not card.capabilities.bad_words:
            raise UnsupportedError(
                f"min_tokens is not supported by this model, which has {len(ids)} end tokens (target {card.target}); "
                "leave it out.",
                param="min_tokens",
            )
    if body.stop_token_ids:
        ids = tuple(dict.fromkeys((*ids, *_stop_token_ids(body.stop_token_ids, card, limits))))
    return StopConditions(ids, _stop_strings(body.stop, limits) if body.stop is not None else ())


def resolve_max_tokens(
    wanted: int | None,
    prompt_tokens: int,
    card: ModelMetadata,
    *,
    default: int | None = None,
    param: str = "max_tokens",
    fit: bool = False,
) -> int:
    """Return the maximum tokens of an answer.

    Args:
        wanted: The request's limit in tokens; None without a limit.
        prompt_tokens: Tokens of the prompt.
        card: The metadata of the model.
        default: The limit for a request without a limit; None for the rest of the context window.
        param: The request's field with the limit.
        fit: True to shorten an answer that does not fit, instead of raising an error.

    Raises:
        ContextLengthError: Prompt and answer do not fit into the context window.
    """
    room = card.max_seq_len - prompt_tokens
    if room < 1:
        raise context_length_error(card, prompt_tokens, "messages" if param != "prompt" else param)
    if wanted is not None and wanted > room:
        if fit:
            return room
        raise ContextLengthError(
            f"This model's maximum context length is {card.max_seq_len} tokens; {prompt_tokens} in the prompt and "
            f"{wanted} for the answer are {prompt_tokens + wanted}. Shorten the prompt or lower '{param}'.",
            param=param,
        )
    return wanted or min(room, default or room)


def tokenize_bad_words(
    words: Sequence[str], tokenizer: TextTokenizer, limits: RequestLimits
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that the engine must ban.

    Each word has two sequences: at the start of a text, and after a space.
    """
    if len(words) > limits.stop_strings or any(len(word) > limits.stop_length for word in words):
        raise InvalidRequestError(
            f"At most {limits.stop_strings} bad_words of at most {limits.stop_length} characters are allowed; send "
            "fewer or shorter words.",
            param="bad_words",
        )
    forms = [tokenizer.encode(form, add_special_tokens=False) for word in words for form in (word, " " + word)]
    return tuple(dict.fromkeys(tuple(ids) for ids in forms if ids))


def _unsupported(field: str, card: ModelMetadata) -> UnsupportedError:
    hint = "" if card.target == "tensorrt" and field != "prompt_logprobs" else _HINTS.get(field, "")
    return UnsupportedError(f"{field} is not supported by this model (target {card.target}).{hint}", param=field)


def _stop_token_ids(ids: Sequence[int], card: ModelMetadata, limits: RequestLimits) -> Sequence[int]:
    if len(ids) > limits.stop_token_ids:
        raise InvalidRequestError(
            f"At most {limits.stop_token_ids} stop_token_ids are allowed; send fewer.", param="stop_token_ids"
        )
    if max(ids) >= card.vocab_size:
        raise InvalidRequestError(
            f"The stop_token_ids must be token ids from 0 to {card.vocab_size - 1}.", param="stop_token_ids"
        )
    return ids


def _stop_strings(stop: str | Sequence[str], limits: RequestLimits) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > limits.stop_strings or not all(0 < len(one) <= limits.stop_length for one in stops):
        raise InvalidRequestError(
            f"'stop' must have at most {limits.stop_strings} stop strings of 1 to {limits.stop_length} characters.",
            param="stop",
        )
    return stops


def _logit_bias(bias: Mapping[str, float], card: ModelMetadata) -> dict[int, float]:
    try:
        biases = {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise InvalidRequestError(
            "The keys of logit_bias must be token ids, such as 50256.", param="logit_bias"
        ) from error
    if not 0 <= min(biases) <= max(biases) < card.vocab_size:
        raise InvalidRequestError(
            f"The keys of logit_bias must be token ids from 0 to {card.vocab_size - 1}.", param="logit_bias"
        )
    return biases


def with_request_field(error: UnsupportedError) -> UnsupportedError:
    """Return an engine's error with the name of the request's field instead of the tensor's name."""
    field = REQUEST_FIELD_BY_TENSOR.get(error.param or "", error.param)
    message = error.message.replace(f"{error.param}:", f"{field}:", 1)
    return UnsupportedError(message, param=field, detail=error.detail)
