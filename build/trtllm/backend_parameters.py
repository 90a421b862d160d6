"""The parameters of NVIDIA's C++ backend that a user may set, and the type of each.

Source: NVIDIA/TensorRT-LLM `triton_backend/inflight_batcher_llm/src/model_state.cc`
(`GetParameter`) and `model_instance_state.cc`. The backend does not reject a value that it cannot
parse, or that does not fit its type: it warns and uses its default. It reads -1 bytes as 2^64 - 1.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from llmops.errors import InputError

_FLOAT = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_LISTS = re.compile(r"\d{1,9}(,\d{1,9})*(;\d{1,9}(,\d{1,9})*)*")
_PATTERNS = {
    # The executor refuses negative numbers when the model loads (executor/executorConfig.cpp,
    # extendedRuntimePerfKnobConfig.cpp).
    "int": (re.compile(r"\d{1,9}"), "a whole number of at most nine digits"),
    "bytes": (re.compile(r"\d{1,18}"), "a number of bytes"),
    "bool": (re.compile("true|false"), "true or false"),
    # The executor refuses other values when the model loads (executor/kvCacheConfig.cpp, setMaxTokens,
    # setMaxAttentionWindowVec, setFreeGpuMemoryFraction).
    "size": (re.compile(r"0*[1-9]\d{0,8}"), "a whole number from 1 to 999999999"),
    "sizes": (re.compile(r"0*[1-9]\d{0,8}(,0*[1-9]\d{0,8})*"), "whole numbers of at least 1, separated by commas"),
    "share": (_FLOAT, "a number above 0 and below 1, such as 0.9"),
    # tllmRuntime.cpp, setWeightStreaming, ignores numbers from 1 on.
    "part": (_FLOAT, "a number from 0 to 1"),
    "lists": (_LISTS, "numbers separated by commas, with ; between instances"),
    "text": (re.compile(".+"), "a text"),
}
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
#: Parameters of the backend that a user cannot set -> the reason. Sources:
#: batch_manager/kvCacheManager.cpp, "streamLLM is not supported at the moment"; only engines that
#: decode by lookahead read the sizes of lookahead.
_REFUSED = {
    "sink_token_length": "TensorRT-LLM 1.2 loads no engine with it",
    **dict.fromkeys(_LOOKAHEAD, "--set lookahead sets it"),
}


class Parameter(NamedTuple):
    """A parameter of the C++ backend, whose values are of the type `kind` or one of `choices`.

    llmops writes `default` unless the user sets the parameter. A parameter with an empty default is
    left out.
    """

    kind: str
    default: str = ""
    choices: tuple[str, ...] = ()


def _same(kind: str, names: str) -> dict[str, Parameter]:
    return {name: Parameter(kind) for name in names.split()}


PARAMETERS: dict[str, Parameter] = {
    "batch_scheduler_policy": Parameter("text", "guaranteed_no_evict", ("guaranteed_no_evict", "max_utilization")),
    "kv_cache_free_gpu_mem_fraction": Parameter("share", "0.9"),
    "kv_cache_host_memory_bytes": Parameter("bytes", "0"),
    "enable_kv_cache_reuse": Parameter("bool", "true"),
    "enable_chunked_context": Parameter("bool", "true"),
    "exclude_input_in_output": Parameter("bool", "true"),
    "cancellation_check_period_ms": Parameter("int", "20"),
    "stats_check_period_ms": Parameter("int", "100"),
    # In the modes top_k and top_p, no layer samples for requests without, or with, a top-k, and
    # such requests never end (layers/samplingLayer.cpp; samplingTopKKernels.h,
    # setupTopKTopPRuntimeArgOne).
    "decoding_mode": Parameter("text", "top_k_top_p", ("top_k_top_p", "lookahead")),
    **_same("lists", "gpu_device_ids participant_ids"),
    **_same("sizes", "max_attention_window_size"),
    **_same("size", "max_tokens_in_paged_kv_cache num_nodes"),
    **_same("size", "lora_cache_max_adapter_size lora_cache_optimal_adapter_size"),
    **_same("int", "iter_stats_max_iterations request_stats_max_iterations cuda_graph_cache_size recv_poll_period_ms"),
    **_same("bytes", "lora_cache_host_memory_bytes"),
    **_same("share", "lora_cache_gpu_memory_fraction"),
    **_same("part", "gpu_weights_percent"),
    # The backend's default, true, normalises over the tokens that top-k and top-p leave, so a
    # greedy token gets 0.0 (model_instance_state.cc: `bool normalizeLogProbs = true`;
    # tensorrtllm_backend issue #276).
    "normalize_log_probs": Parameter("bool", "false"),
    **_same("bool", "multi_block_mode enable_context_fmha_fp32_acc cuda_graph_mode"),
    **_same("bool", "kv_cache_onboard_blocks"),
    **_same("text", "lora_prefetch_dir"),
}

#: Parameters of the backend that TensorRT-LLM's executor does not have.
NVIDIA_ONLY = (
    "participant_ids",
    "num_nodes",
    "exclude_input_in_output",
    "cancellation_check_period_ms",
    "stats_check_period_ms",
    "request_stats_max_iterations",
    "guided_decoding_backend",
)


def checked_parameters(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters in the form of config.pbtxt.

    Raises:
        InputError: The backend does not have a parameter, or would not parse a value.
    """
    checked = {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in parameters.items()
    }
    for name, value in checked.items():
        _check(name, value)
    return checked


def _check(name: str, value: str) -> None:
    if name in _REFUSED:
        raise InputError(f"serve.{name} is not possible, because {_REFUSED[name]}; leave it out.")
    parameter = PARAMETERS.get(name)
    if parameter is None:
        raise InputError(f"The tensorrtllm backend has no parameter serve.{name}; it has {', '.join(PARAMETERS)}.")
    if not value:
        return
    pattern, expected = _PATTERNS[parameter.kind]
    if parameter.choices and value not in parameter.choices:
        raise InputError(f"serve.{name} must be {' or '.join(parameter.choices)}, not {value}.")
    if not pattern.fullmatch(value) or not _in_bounds(parameter.kind, value):
        raise InputError(f"serve.{name} must be {expected}, not {value}.")


def _in_bounds(kind: str, value: str) -> bool:
    """Return True unless `value` is a number outside the bounds of its kind."""
    if kind == "share":
        return 0 < float(value) < 1
    return kind != "part" or 0 <= float(value) <= 1
