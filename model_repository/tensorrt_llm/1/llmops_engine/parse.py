"""Tensors of TensorRT-LLM's contract -> GenerationRequest. What cannot be honoured is refused, never dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .request import GenerationRequest, Refused, Sampling

Tensors = dict[str, np.ndarray]

# Present but without effect at this value, as clients and ensembles send them; anything else is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "len_penalty": (0.0, 1.0),
    "early_stopping": (False,),
    "beam_search_diversity_rate": (0.0,),
    "runtime_top_p_min": (0.0,),
    "runtime_top_p_decay": (0.0, 1.0),
    "runtime_top_p_reset_ids": (-1,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "exclude_input_in_output": (True,),
    "skip_cross_attn_blocks": (False,),
    "prompt_vocab_size": (0,),
}
UNDERSTOOD = frozenset(
    [
        "input_ids",
        "input_lengths",
        "request_output_len",
        "end_id",
        "pad_id",
        "stop_words_list",
        "bad_words_list",
        "runtime_top_k",
        "runtime_top_p",
        "runtime_min_p",
        "temperature",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "seed",
        "return_log_probs",
        "num_return_sequences",
        "embedding_bias",
        "guided_decoding_guide_type",
        "guided_decoding_guide",
        "caller",
        "lora_task_id",
        "streaming",
        "stop",
        "return_context_ids",
        "return_num_input_tokens",
        "return_num_output_tokens",
    ]
)
# capability of the card -> the tensors that need it, each with the value that asks for nothing
NEEDS: dict[str, dict[str, Any]] = {
    "min_p": {"runtime_min_p": 0.0},
    "seed": {"seed": None},
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}
_LONGEST_CALLER = 256
GUIDES = ("json", "json_schema", "regex", "ebnf_grammar")


@dataclass(frozen=True)
class Limits:
    """What the engine allows; lengths in tokens. `target` is named in refusals; `lacks` are capabilities of NEEDS that
    the library would ignore."""

    target: str
    max_seq_len: int
    vocab_size: int
    end_ids: frozenset[int]
    max_sequences: int = 8
    adapters: frozenset[int] = frozenset()
    lacks: frozenset[str] = frozenset()
    guides: tuple[str, ...] = GUIDES


def parse_request(tensors: Tensors, limits: Limits) -> GenerationRequest:
    """Raises Refused."""
    _refuse_unknown(tensors, limits)
    ids = _input_ids(tensors, limits)
    output_len = _output_len(tensors, ids.size, limits)
    end_ids = _end_ids(tensors, limits)
    return GenerationRequest(
        input_ids=ids,
        max_new_tokens=output_len,
        end_ids=end_ids,
        stop_words=word_list(tensors.get("stop_words_list"), "stop_words_list"),
        min_tokens=_bounded(tensors, "min_tokens", 0, 0, output_len),
        num_sequences=_bounded(tensors, "num_return_sequences", 1, 1, limits.max_sequences),
        sampling=_sampling(tensors),
        log_probs=flag(tensors, "return_log_probs"),
        guide=_guide(tensors, limits),
        caller=text(tensors, "caller")[:_LONGEST_CALLER],
        adapter=_adapter(tensors, limits),
        streaming=flag(tensors, "streaming"),
        context_ids=flag(tensors, "return_context_ids"),
        num_input_tokens=flag(tensors, "return_num_input_tokens"),
        num_output_tokens=flag(tensors, "return_num_output_tokens"),
    )


def word_list(words: np.ndarray | None, name: str) -> list[list[int]]:
    """INT32 [1, 2, n]: row 0 the ids of all words, row 1 where each word ends, padded with -1."""
    if words is None or words.size == 0:
        return []
    if words.size % 2:
        raise Refused(f"{name}: must be [1, 2, n], got {list(words.shape)}")
    flat, ends = words.reshape(2, -1).tolist()
    result, start = [], 0
    for end in ends:
        if end < 0:
            break
        if not start <= end <= len(flat):
            raise Refused(f"{name}: offset {end} is not within the {len(flat)} ids")
        if end > start:
            result.append(flat[start:end])
        start = end
    return result


def _refuse_unknown(tensors: Tensors, limits: Limits) -> None:
    for name, value in tensors.items():
        if name in UNDERSTOOD:
            continue
        if value.size == 0 or (name in NEUTRAL and value.size == 1 and value.item() in NEUTRAL[name]):
            continue
        if name in NEUTRAL:
            wanted = " or ".join(str(neutral).lower() for neutral in NEUTRAL[name])
            raise Refused(f"{name}: only {wanted} is supported by target {limits.target}")
        raise Refused(f"{name}: not supported by target {limits.target}")
    for name, neutral in ((n, v) for capability in limits.lacks for n, v in NEEDS[capability].items()):
        if scalar(tensors, name, neutral) != neutral:
            raise Refused(f"{name}: not supported by target {limits.target} with its TensorRT-LLM")
    if word_list(tensors.get("bad_words_list"), "bad_words_list"):
        raise Refused(f"bad_words_list: not supported by target {limits.target}")
    if np.any(tensors.get("embedding_bias", 0)):
        raise Refused(f"embedding_bias: not supported by target {limits.target}")


def _input_ids(tensors: Tensors, limits: Limits) -> np.ndarray:
    ids = tensors.get("input_ids")
    if ids is None or ids.size == 0:
        raise Refused("input_ids: at least one token is needed")
    if ids.ndim > 1 and ids.shape[0] != 1:
        raise Refused(f"input_ids: one sequence per request, got a batch of {ids.shape[0]}")
    length = scalar(tensors, "input_lengths", ids.size)
    if not 0 < length <= ids.size:
        raise Refused(f"input_lengths: {length} does not fit the {ids.size} tokens of input_ids")
    flat = ids.reshape(-1)[:length].astype(np.int64)
    if flat.min() < 0 or flat.max() >= limits.vocab_size:
        raise Refused(f"input_ids: ids must be from 0 to {limits.vocab_size - 1}")
    return flat


def _output_len(tensors: Tensors, prompt: int, limits: Limits) -> int:
    length = scalar(tensors, "request_output_len", 0)
    if length < 1:
        raise Refused(f"request_output_len: must be at least 1, got {length}")
    if prompt + length > limits.max_seq_len:
        raise Refused(
            f"request_output_len: {prompt} prompt tokens and {length} new ones are more than the "
            f"{limits.max_seq_len} of max_seq_len"
        )
    return length


def _end_ids(tensors: Tensors, limits: Limits) -> frozenset[int]:
    if "end_id" not in tensors:
        return limits.end_ids
    end_id = scalar(tensors, "end_id", -1)
    if end_id >= limits.vocab_size:
        raise Refused(f"end_id: must be below {limits.vocab_size}, or -1 to ignore the end of text")
    return frozenset() if end_id < 0 else frozenset([end_id])


def _sampling(tensors: Tensors) -> Sampling:
    temperature = _bounded(tensors, "temperature", 1.0, 0.0, 100.0)
    top_k = _bounded(tensors, "runtime_top_k", 0, 0, 2**31 - 1)
    top_p = _bounded(tensors, "runtime_top_p", 1.0, 0.0, 1.0)
    repetition = _bounded(tensors, "repetition_penalty", 1.0, 0.0, 100.0)
    if repetition == 0:
        raise Refused("repetition_penalty: must be greater than 0")
    return Sampling(
        temperature=temperature,
        # TensorRT-LLM's top_p 0 means: not used
        top_p=top_p or 1.0,
        top_k=top_k,
        min_p=_bounded(tensors, "runtime_min_p", 0.0, 0.0, 1.0),
        repetition_penalty=repetition,
        presence_penalty=_bounded(tensors, "presence_penalty", 0.0, -100.0, 100.0),
        frequency_penalty=_bounded(tensors, "frequency_penalty", 0.0, -100.0, 100.0),
        seed=scalar(tensors, "seed", None),
    )


def _guide(tensors: Tensors, limits: Limits) -> tuple[str, str] | None:
    kind = text(tensors, "guided_decoding_guide_type")
    guide = text(tensors, "guided_decoding_guide")
    if not kind:
        if guide:
            raise Refused("guided_decoding_guide_type: is needed with guided_decoding_guide")
        return None
    if kind not in GUIDES:
        raise Refused(f"guided_decoding_guide_type: must be one of {', '.join(GUIDES)}, got {kind}")
    if kind not in limits.guides:
        raise Refused(f"guided_decoding_guide_type: {kind} is not supported by this engine of target {limits.target}")
    if kind != "json" and not guide:
        raise Refused(f"guided_decoding_guide: is needed for the type {kind}")
    return kind, guide


def _adapter(tensors: Tensors, limits: Limits) -> int:
    task_id: int = scalar(tensors, "lora_task_id", 0)
    if task_id and task_id not in limits.adapters:
        known = ", ".join(map(str, sorted(limits.adapters)))
        hint = f"this engine has {known}, and 0 for none" if known else f"only 0 is supported by target {limits.target}"
        raise Refused(f"lora_task_id: {hint}")
    return task_id


def text(tensors: Tensors, name: str) -> str:
    value = tensors.get(name)
    if value is None or value.size == 0:
        return ""
    raw = value.reshape(-1)[0]
    try:
        return raw.decode() if isinstance(raw, bytes) else str(raw)
    except UnicodeDecodeError:
        raise Refused(f"{name}: is not valid UTF-8") from None


def flag(tensors: Tensors, name: str) -> bool:
    return bool(scalar(tensors, name, False))


def scalar(tensors: Tensors, name: str, default: Any) -> Any:
    value = tensors.get(name)
    if value is None or value.size == 0:
        return default
    if value.size != 1:
        raise Refused(f"{name}: one value per request, got {value.size}")
    return value.item()


def _bounded(tensors: Tensors, name: str, default: Any, low: Any, high: Any) -> Any:
    value = scalar(tensors, name, default)
    if not low <= value <= high:  # also catches NaN
        raise Refused(f"{name}: must be from {low} to {high}, got {value}")
    return value
