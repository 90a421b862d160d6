"""A parser that turns TensorRT-LLM's tensors into a RuntimeRequest.

The parser rejects every value that the engine cannot honour, and ignores none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llmops_contract as contract
import numpy as np
from llmops_contract import Tensor

from .request import RequestRejectedError, RuntimeRequest, RuntimeSamplingParams

Tensors = dict[str, np.ndarray]

SUPPORTED_INPUTS = frozenset(tensor.name for tensor in contract.PYTHON_ENGINE_INPUTS if tensor.taken)
#: Values without an effect, by input. Clients and ensembles send these values; any other value of
#: the inputs is rejected.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    tensor.name: tensor.neutral for tensor in contract.PYTHON_ENGINE_INPUTS if tensor.neutral
}
#: The tensors that need a capability, by the capability's key in the model metadata.
CAPABILITY_INPUTS: dict[str, list[Tensor]] = {
    needed: [tensor for tensor in contract.PYTHON_ENGINE_INPUTS if tensor.needs == needed]
    for needed in {tensor.needs for tensor in contract.PYTHON_ENGINE_INPUTS if tensor.needs}
}
_SCALARS = {
    tensor.name: tensor
    for tensor in contract.PYTHON_ENGINE_INPUTS
    if tensor.taken and tensor.scalar and tensor.datatype != contract.BYTES
}
_DEFAULTS = {name: tensor.default for name, tensor in _SCALARS.items()}
_MAX_CALLER_LENGTH = 256


@dataclass(frozen=True)
class EngineCapabilities:
    """The capabilities and features of an engine.

    `target` is the build target, which error messages name. `max_seq_len` is in tokens, and
    `max_sequences` the maximum number of answers to one request. `unsupported` has the keys of
    CAPABILITY_INPUTS whose tensors the library would ignore. `guides` are the supported kinds of
    grammars.
    """

    target: str
    max_seq_len: int
    vocab_size: int
    end_ids: frozenset[int]
    max_sequences: int = 8
    adapters: frozenset[int] = frozenset()
    unsupported: frozenset[str] = frozenset()
    bad_words: bool = False
    logit_bias: bool = False
    guides: tuple[str, ...] = contract.GUIDE_KINDS


def parse_request(tensors: Tensors, capabilities: EngineCapabilities) -> RuntimeRequest:
    """Return the request in `tensors`. Raise RequestRejectedError if the engine cannot honour it."""
    _reject_unsupported(tensors, capabilities)
    scalars = _DEFAULTS.copy()
    for name, value in tensors.items():
        if name in _SCALARS:
            scalars[name] = _number(value, _SCALARS[name], _DEFAULTS[name])
    ids = _input_ids(tensors, capabilities)
    output_len = _output_len(scalars, ids.size, capabilities)
    return RuntimeRequest(
        input_ids=ids,
        max_new_tokens=output_len,
        end_ids=_end_ids(tensors, capabilities),
        stop_words=word_list(tensors.get(contract.STOP_WORDS_LIST.name), contract.STOP_WORDS_LIST),
        bad_words=_bad_words(tensors, capabilities),
        embedding_bias=_embedding_bias(tensors, capabilities),
        min_tokens=_within(scalars, contract.MIN_TOKENS, 0, output_len),
        num_sequences=_within(scalars, contract.NUM_RETURN_SEQUENCES, 1, capabilities.max_sequences),
        sampling=_sampling(scalars),
        log_probs=scalars[contract.RETURN_LOG_PROBS.name],
        top_log_probs=scalars[contract.TOP_LOG_PROBS.name],
        prompt_log_probs=scalars[contract.PROMPT_LOG_PROBS.name],
        guide=_guide(tensors, capabilities),
        caller=text(tensors, contract.CALLER)[:_MAX_CALLER_LENGTH],
        cache_salt=scalars[contract.CACHE_SALT.name],
        adapter=_adapter(scalars, capabilities),
        streaming=scalars[contract.STREAMING.name],
        context_ids=scalars[contract.RETURN_CONTEXT_IDS.name],
        num_input_tokens=scalars[contract.RETURN_NUM_INPUT_TOKENS.name],
        num_output_tokens=scalars[contract.RETURN_NUM_OUTPUT_TOKENS.name],
    )


def word_list(words: np.ndarray | None, name: Tensor | str) -> list[list[int]]:
    """Decode a word list, INT32 [1, 2, n].

    Row 0 has the ids of all words. Row 1 has the offset of the end of each word, padded with -1.
    """
    if words is None or words.size == 0:
        return []
    if words.size % 2:
        raise RequestRejectedError(f"{name}: must be [1, 2, n], got {list(words.shape)}")
    flat, ends = words.reshape(2, -1).tolist()
    result, start = [], 0
    for end in ends:
        if end < 0:
            break
        if not start <= end <= len(flat):
            raise RequestRejectedError(f"{name}: offset {end} is not within the {len(flat)} ids")
        if end > start:
            result.append(flat[start:end])
        start = end
    return result


def _reject_unsupported(tensors: Tensors, capabilities: EngineCapabilities) -> None:
    for name in sorted(tensors.keys() - SUPPORTED_INPUTS):
        value = tensors[name]
        if value.size == 0 or (name in NEUTRAL_VALUES and value.size == 1 and value.item() in NEUTRAL_VALUES[name]):
            continue
        if name in NEUTRAL_VALUES:
            wanted = " or ".join(str(neutral).lower() for neutral in NEUTRAL_VALUES[name])
            raise RequestRejectedError(f"{name}: only {wanted} is supported by target {capabilities.target}")
        raise RequestRejectedError(f"{name}: not supported by target {capabilities.target}")
    for capability in capabilities.unsupported:
        for tensor in CAPABILITY_INPUTS[capability]:
            if scalar(tensors, tensor) != tensor.default:
                raise RequestRejectedError(
                    f"{tensor}: not supported by target {capabilities.target} with its TensorRT-LLM"
                )


def _bad_words(tensors: Tensors, capabilities: EngineCapabilities) -> list[list[int]]:
    words = word_list(tensors.get(contract.BAD_WORDS_LIST.name), contract.BAD_WORDS_LIST)
    if words and not capabilities.bad_words:
        raise RequestRejectedError(f"{contract.BAD_WORDS_LIST}: not supported by target {capabilities.target}")
    return words


def _embedding_bias(tensors: Tensors, capabilities: EngineCapabilities) -> np.ndarray | None:
    """Return the bias as FP32 [vocabulary], or None if the bias has no effect."""
    bias = tensors.get(contract.EMBEDDING_BIAS.name)
    if bias is None or not bias.any():
        return None
    if not capabilities.logit_bias:
        raise RequestRejectedError(f"{contract.EMBEDDING_BIAS}: not supported by target {capabilities.target}")
    if bias.size != capabilities.vocab_size or not np.isfinite(bias).all():
        raise RequestRejectedError(
            f"{contract.EMBEDDING_BIAS}: must be {capabilities.vocab_size} finite numbers, one per token"
        )
    return bias.reshape(-1).astype(np.float32)


def _input_ids(tensors: Tensors, capabilities: EngineCapabilities) -> np.ndarray:
    tensor = contract.INPUT_IDS
    ids = tensors.get(tensor.name)
    if ids is None or ids.size == 0:
        raise RequestRejectedError(f"{tensor}: empty; send at least one token")
    if ids.ndim > 1 and ids.shape[0] != 1:
        raise RequestRejectedError(f"{tensor}: must be one sequence per request, got a batch of {ids.shape[0]}")
    length = scalar(tensors, contract.INPUT_LENGTHS, ids.size)
    if not 0 < length <= ids.size:
        raise RequestRejectedError(f"{contract.INPUT_LENGTHS}: {length} does not fit the {ids.size} tokens of {tensor}")
    flat = ids.reshape(-1)[:length].astype(np.int64)
    # viewed as unsigned, a negative id is larger than all valid ids
    if flat.view(np.uint64).max() >= capabilities.vocab_size:
        raise RequestRejectedError(f"{tensor}: ids must be from 0 to {capabilities.vocab_size - 1}")
    return flat


def _output_len(scalars: dict[str, Any], prompt: int, capabilities: EngineCapabilities) -> int:
    length: int = scalars[contract.REQUEST_OUTPUT_LEN.name]
    if length < 1:
        raise RequestRejectedError(f"{contract.REQUEST_OUTPUT_LEN}: must be at least 1, got {length}")
    if prompt + length > capabilities.max_seq_len:
        raise RequestRejectedError(
            f"{contract.REQUEST_OUTPUT_LEN}: {prompt} prompt tokens and {length} new tokens exceed "
            f"max_seq_len, {capabilities.max_seq_len}; shorten the prompt or the answer"
        )
    return length


def _end_ids(tensors: Tensors, capabilities: EngineCapabilities) -> frozenset[int]:
    if contract.END_ID.name not in tensors:
        return capabilities.end_ids
    end_id = scalar(tensors, contract.END_ID)
    if end_id >= capabilities.vocab_size:
        raise RequestRejectedError(
            f"{contract.END_ID}: must be below {capabilities.vocab_size}, or -1 to ignore the end of text"
        )
    return frozenset() if end_id < 0 else frozenset([end_id])


def _sampling(scalars: dict[str, Any]) -> RuntimeSamplingParams:
    if scalars[contract.REPETITION_PENALTY.name] == 0:
        raise RequestRejectedError(f"{contract.REPETITION_PENALTY}: must be greater than 0")
    return RuntimeSamplingParams(
        temperature=scalars[contract.TEMPERATURE.name],
        # TensorRT-LLM treats a top_p of 0 as not set
        top_p=scalars[contract.RUNTIME_TOP_P.name] or 1.0,
        top_k=scalars[contract.RUNTIME_TOP_K.name],
        min_p=scalars[contract.RUNTIME_MIN_P.name],
        repetition_penalty=scalars[contract.REPETITION_PENALTY.name],
        presence_penalty=scalars[contract.PRESENCE_PENALTY.name],
        frequency_penalty=scalars[contract.FREQUENCY_PENALTY.name],
        seed=scalars[contract.SEED.name],
    )


def _guide(tensors: Tensors, capabilities: EngineCapabilities) -> tuple[str, str] | None:
    kind = text(tensors, contract.GUIDE_TYPE)
    guide = text(tensors, contract.GUIDE)
    if not kind:
        if guide:
            raise RequestRejectedError(f"{contract.GUIDE_TYPE}: is needed with {contract.GUIDE}")
        return None
    if kind not in contract.GUIDE_KINDS:
        raise RequestRejectedError(
            f"{contract.GUIDE_TYPE}: must be one of {', '.join(contract.GUIDE_KINDS)}, got {kind}"
        )
    if kind not in capabilities.guides:
        raise RequestRejectedError(
            f"{contract.GUIDE_TYPE}: {kind} is not supported by this engine of target {capabilities.target}"
        )
    if kind != "json" and not guide:
        raise RequestRejectedError(f"{contract.GUIDE}: is needed for the type {kind}")
    return kind, guide


def _adapter(scalars: dict[str, Any], capabilities: EngineCapabilities) -> int:
    task_id: int = scalars[contract.LORA_TASK_ID.name]
    if task_id and task_id not in capabilities.adapters:
        known = ", ".join(map(str, sorted(capabilities.adapters)))
        hint = (
            f"must be 0 for no adapter, or one of {known}"
            if known
            else f"only 0 is supported by target {capabilities.target}"
        )
        raise RequestRejectedError(f"{contract.LORA_TASK_ID}: {hint}")
    return task_id


def text(tensors: Tensors, tensor: Tensor) -> str:
    """Return the text of a tensor, or an empty text if the tensor is missing."""
    value = tensors.get(tensor.name)
    if value is None or value.size == 0:
        return ""
    raw = value.reshape(-1)[0]
    try:
        return raw.decode() if isinstance(raw, bytes) else str(raw)
    except UnicodeDecodeError:
        raise RequestRejectedError(f"{tensor}: not valid UTF-8") from None


def flag(tensors: Tensors, tensor: Tensor) -> bool:
    """Return True if a boolean tensor is present and True."""
    return bool(scalar(tensors, tensor))


def scalar(tensors: Tensors, tensor: Tensor, default: Any = None) -> Any:
    """Return the number in a tensor, or a default if the tensor is missing or empty.

    The default is `default`, or the contract's default if `default` is None.

    Raises:
        RequestRejectedError: The number is outside of the contract's bounds.
    """
    default = tensor.default if default is None else default
    value = tensors.get(tensor.name)
    return default if value is None else _number(value, tensor, default)


def _number(value: np.ndarray, tensor: Tensor, default: Any) -> Any:
    if value.size == 0:
        return default
    if value.size != 1:
        raise RequestRejectedError(f"{tensor}: must be one value per request, got {value.size}")
    found = value.item()
    if tensor.bounds is not None:
        _check(tensor, found, *tensor.bounds)
    return found


def _within(scalars: dict[str, Any], tensor: Tensor, low: int, high: int) -> int:
    """Return the number of `tensor` in `scalars`. Both bounds are allowed values.

    Raises:
        RequestRejectedError: The number is smaller than `low` or larger than `high`.
    """
    value: int = scalars[tensor.name]
    _check(tensor, value, low, high)
    return value


def _check(tensor: Tensor, value: Any, low: Any, high: Any) -> None:
    if not low <= value <= high:  # written so that NaN is rejected, too
        raise RequestRejectedError(f"{tensor}: must be from {low} to {high}, got {value}")
