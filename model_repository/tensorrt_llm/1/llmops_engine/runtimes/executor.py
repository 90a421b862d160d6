"""TensorRT engines over `tensorrt_llm.bindings.executor`, the C++ executor that NVIDIA's Triton backend runs, too.

The executor schedules and generates in a thread of its own: `enqueue_request` hands a request over, and
`await_responses` brings what is new since the last call. An engine of several GPUs has one process per GPU under
mpirun, each with an executor; the first is the leader, which takes requests and answers
(docs/tensorrt-llm-calls.md lists each call, with its defaults and exceptions).
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llmops_contract as contract

from ..engine_runtime import (
    FAILED,
    LENGTH,
    RUNNING,
    STOP,
    DeadEngineError,
    EngineRuntime,
    EngineStats,
    KvCacheEvent,
    StepOutput,
)
from ..request import RequestRejectedError, RuntimeRequest
from .remote import PYTHON_VARIABLE, RemoteRuntime
from .stop_words import StopWordMatcher
from .torch_tensors import as_tensor
from .visible_gpus import restrict_visible_gpus

if TYPE_CHECKING:
    from ..kv_events import KvEventTranslator

#: KV-cache events that the executor keeps until they are read; the oldest are dropped.
_EVENTS_KEPT = 65_536
#: Tokens per KV-cache block where the engine's config.json does not say: trtllm-build's default.
_TOKENS_PER_BLOCK = 32
_AT_ONCE = 0
_REASONS = {"END_ID": STOP, "STOP_WORDS": STOP, "LENGTH": LENGTH}
#: What CUDA says when the process can compute nothing any more; every later request would fail as well
#: (CUDA Runtime API, cudaError: "the process must be terminated and relaunched").
_CUDA_IS_LOST = (
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "unspecified launch failure",
    "misaligned address",
    "an illegal instruction was encountered",
    "uncorrectable ECC error",
)
_GUIDES = {
    "json": "JSON",
    "json_schema": "JSON_SCHEMA",
    "regex": "REGEX",
    "ebnf_grammar": "EBNF_GRAMMAR",
}
_DECODING_MODES = {"top_k": "TopK", "top_p": "TopP", "top_k_top_p": "TopKTopP", "lookahead": "Lookahead"}


@dataclass(frozen=True)
class ExecutorOptions:
    """`parameters` are those of NVIDIA's C++ backend, as config.pbtxt has them; `ranks` is the number of GPUs."""

    model: str
    ranks: int
    max_batch_size: int
    parameters: Mapping[str, str]
    end_ids: tuple[int, ...] = ()


def create(parameters: dict[str, str], card: dict[str, Any]) -> EngineRuntime:
    """Start the engine in this process, or one process per GPU under mpirun where there are several."""
    restrict_visible_gpus(parameters.get("gpu_device_ids", ""))
    options = ExecutorOptions(
        model=parameters["gpt_model_path"],
        ranks=int(parameters["world_size"]),
        max_batch_size=card["max_batch_size"],
        parameters=parameters,
        end_ids=tuple(card["end_ids"]),
    )
    python = os.environ.get(PYTHON_VARIABLE)
    if python or options.ranks > 1:
        return RemoteRuntime(python or sys.executable, options, "executor", options.ranks)
    return ExecutorRuntime(options, _library())


def start(fields: dict[str, Any]) -> ExecutorRuntime:
    """Load this process's rank of the engine; `fields` are those of ExecutorOptions."""
    return ExecutorRuntime(ExecutorOptions(**fields), _library())


def _library() -> Any:
    return importlib.import_module("tensorrt_llm.bindings.executor")


class _Sequence:
    __slots__ = ("log_probs", "matcher", "number", "prompt_tokens", "started")

    def __init__(self, number: int, request: RuntimeRequest, model_ends: tuple[int, ...]) -> None:
        self.number = number
        self.log_probs = request.log_probs
        self.prompt_tokens = int(request.input_ids.size)
        self.started = False
        words = [word for word in _words(request, _ends(request, model_ends)) if len(word) == 1]
        self.matcher = StopWordMatcher(words, request.min_tokens) if words and request.min_tokens else None


class ExecutorRuntime(EngineRuntime):
    """One rank of an engine; `leads` says whether this rank takes requests.

    `step_wait`: how long a step waits for the first token (s).
    """

    step_wait = 0.05

    def __init__(self, options: ExecutorOptions, library: Any) -> None:
        self._api = library
        self._options = options
        self._size, self._vocabulary = _sizes(Path(options.model))
        config = executor_config(library, options.parameters, options.max_batch_size)
        self._executor = library.Executor(Path(options.model), library.ModelType.DECODER_ONLY, config)
        self.leads: bool = self._executor.can_enqueue_requests()
        self._sequences: dict[int, _Sequence] = {}
        self._keys: dict[int, int] = {}
        self._latest: Any = None
        self._prefilled = 0
        # layers with windows of their own count their blocks, too
        self._counts_blocks = not options.parameters.get("max_attention_window_size")
        reuses = config.kv_cache_config.enable_block_reuse
        self._manager = self._executor.get_kv_cache_event_manager() if self.leads and reuses else None
        self._names: KvEventTranslator | None = _kv_names(self._size) if self._manager is not None else None

    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        made = make_request(self._api, request, sequence, self._options.end_ids, self._vocabulary)
        if self._names is not None:
            self._names.asked(request.input_ids.reshape(-1), request.cache_salt, request.adapter)
        number = self._executor.enqueue_request(made)
        self._sequences[key] = _Sequence(number, request, self._options.end_ids)
        self._keys[number] = key

    def cancel(self, key: int) -> None:
        state = self._forget(key)
        if state is not None:
            self._executor.cancel_request(state.number)

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> Iterable[StepOutput]:
        try:
            responses = self._executor.await_responses(timeout=datetime.timedelta(seconds=self.step_wait))
            self._read_stats()
        except RuntimeError as error:
            raise DeadEngineError(f"TensorRT-LLM: {error}") from error
        return [read for read in map(self._read, responses) if read is not None]

    def _read(self, response: Any) -> StepOutput | None:
        key = self._keys.get(response.request_id)
        if response.has_error():
            return self._failed(key, str(response.error_msg))
        if key is None:
            # the end of a request that was cancelled
            return None
        state, result = self._sequences[key], response.result
        tokens: list[int] = list(result.output_token_ids[0])
        # the tokens are new, and the log-probabilities are those of the whole answer (llmRequest.cpp, createResult)
        log_probs = list(result.log_probs[0][-len(tokens) :]) if state.log_probs and tokens else []
        finish = _REASONS.get(result.finish_reasons[0].name, LENGTH) if result.is_final else RUNNING
        cached = None if state.started else self._cached(state, result)
        state.started = True
        kept = state.matcher.find(tokens) if state.matcher is not None else None
        if kept is not None:
            self.cancel(key) if finish == RUNNING else self._forget(key)
            return StepOutput(key, tokens[:kept], log_probs[:kept], STOP, cached=cached)
        if finish != RUNNING:
            self._forget(key)
        return StepOutput(key, tokens, log_probs, finish, cached=cached)

    def _failed(self, key: int | None, error: str) -> StepOutput | None:
        if any(sign in error for sign in _CUDA_IS_LOST):
            raise DeadEngineError(f"TensorRT-LLM: {error}")
        if key is None:
            return None
        self._forget(key)
        return StepOutput(key, [], [], FAILED, f"{contract.INPUT_IDS}: {error}")

    def _forget(self, key: int) -> _Sequence | None:
        state = self._sequences.pop(key, None)
        if state is not None:
            self._keys.pop(state.number, None)
        return state

    def _cached(self, state: _Sequence, result: Any) -> int | None:
        """Return the prompt tokens that came from the cache.

        Exact because partial reuse is off: each reused block is a whole one, but for a last one that holds the whole
        rest of the prompt. The last token of a prompt is always computed.
        """
        if not self._counts_blocks or result.request_perf_metrics is None:
            return None
        blocks = int(result.request_perf_metrics.kv_cache_metrics.num_reused_blocks)
        return min(blocks * self._size, state.prompt_tokens - 1)

    def _read_stats(self) -> None:
        """Take the statistics of the iterations since the last step."""
        new = self._executor.get_latest_iteration_stats()
        batches = [one.inflight_batching_stats for one in new if one.inflight_batching_stats is not None]
        self._prefilled = sum(batch.num_ctx_tokens for batch in batches)
        if new:
            self._latest = new[-1]

    def stats(self) -> EngineStats:
        latest, active = self._latest, len(self._sequences)
        cache = getattr(latest, "kv_cache_stats", None)
        batch = getattr(latest, "inflight_batching_stats", None)
        waiting_prompts = [state.prompt_tokens for state in self._sequences.values() if not state.started]
        scheduled = min(active, self._options.max_batch_size)
        memory = {} if latest is None else {
            "gpu": latest.gpu_mem_usage, "cpu": latest.cpu_mem_usage, "pinned": latest.pinned_mem_usage
        }  # fmt: skip
        return EngineStats(
            active=active,
            scheduled=scheduled,
            waiting=active - scheduled,
            context=len(waiting_prompts),
            context_tokens=sum(waiting_prompts),
            iteration=0 if latest is None else int(latest.iter),
            kv_blocks_max=0 if cache is None else int(cache.max_num_blocks),
            kv_blocks_used=0 if cache is None else int(cache.used_num_blocks),
            tokens_per_block=0 if cache is None else int(cache.tokens_per_block),
            max_requests=self._options.max_batch_size,
            kv_blocks_reused=None if cache is None else int(cache.reused_blocks),
            paused=0 if batch is None else int(batch.num_paused_requests),
            memory=tuple((kind, int(value)) for kind, value in memory.items()),
            prefilled=self._prefilled,
        )

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        if self._names is None or self._manager is None:
            return ()
        # the binding holds the interpreter's lock while it waits, so nothing is waited for
        events = self._manager.get_latest_events(timeout_ms=_AT_ONCE)
        return self._names.read([found for event in events if (found := _event(event)) is not None])

    def close(self) -> None:
        """End the engine. The ranks that do not lead wait in here until the leader ends it."""
        for key in list(self._sequences):
            self.cancel(key)
        self._executor.shutdown()


def executor_config(api: Any, given: Mapping[str, str], max_batch_size: int) -> Any:
    """Return the `ExecutorConfig` for the parameters of NVIDIA's C++ backend; those that are left out keep the
    executor's defaults.
    """
    values: dict[str, Any] = {
        "max_beam_width": 1,
        "max_batch_size": max_batch_size,
        "scheduler_config": api.SchedulerConfig(
            capacity_scheduler_policy=getattr(api.CapacitySchedulerPolicy, given["batch_scheduler_policy"].upper())
        ),
        "kv_cache_config": _kv_cache_config(api, given),
        "enable_chunked_context": given["enable_chunked_context"] == "true",
        # otherwise a log-probability is divided by what top-k and top-p keep, 0.0 for a greedy token
        "normalize_log_probs": given.get("normalize_log_probs") == "true",
        "decoding_config": _decoding_config(api, given),
        **_numbers(
            given,
            int,
            recv_poll_period_ms="recv_poll_period_ms",
            iter_stats_max_iterations="iter_stats_max_iterations",
        ),
        **_numbers(given, float, gpu_weights_percent="gpu_weights_percent"),
    }
    if given.get("xgrammar_tokenizer_info_path"):
        info = json.loads(Path(given["xgrammar_tokenizer_info_path"]).read_text())
        backend = api.GuidedDecodingConfig.GuidedDecodingBackend.XGRAMMAR
        values["guided_decoding_config"] = api.GuidedDecodingConfig(backend=backend, **info)
    if given.get("lora_prefetch_dir"):
        values["peft_cache_config"] = api.PeftCacheConfig(
            lora_prefetch_dir=given["lora_prefetch_dir"],
            **_numbers(
                given,
                int,
                max_adapter_size="lora_cache_max_adapter_size",
                optimal_adapter_size="lora_cache_optimal_adapter_size",
                host_cache_size="lora_cache_host_memory_bytes",
            ),
            **_numbers(given, float, device_cache_percent="lora_cache_gpu_memory_fraction"),
        )
    config = api.ExecutorConfig(**values)
    knobs = _knobs(api, given)
    if knobs is not None:
        config.extended_runtime_perf_knob_config = knobs
    return config


def _kv_cache_config(api: Any, given: Mapping[str, str]) -> Any:
    reuse = given["enable_kv_cache_reuse"] == "true"
    windows = given.get("max_attention_window_size")
    return api.KvCacheConfig(
        enable_block_reuse=reuse,
        # at most one block per request is computed again, and cached tokens can be counted
        enable_partial_reuse=False,
        event_buffer_max_size=_EVENTS_KEPT if reuse else 0,
        free_gpu_memory_fraction=float(given["kv_cache_free_gpu_mem_fraction"]),
        **({"max_attention_window": [int(one) for one in windows.split(",")]} if windows else {}),
        **(
            {"onboard_blocks": given["kv_cache_onboard_blocks"] == "true"} if "kv_cache_onboard_blocks" in given else {}
        ),
        **_numbers(
            given,
            int,
            max_tokens="max_tokens_in_paged_kv_cache",
            sink_token_length="sink_token_length",
            host_cache_size="kv_cache_host_memory_bytes",
        ),
    )


def _decoding_config(api: Any, given: Mapping[str, str]) -> Any:
    mode = given["decoding_mode"]
    fields = {"decoding_mode": getattr(api.DecodingMode, _DECODING_MODES[mode])()}
    if mode == "lookahead":
        fields["lookahead_decoding_config"] = api.LookaheadDecodingConfig(
            max_window_size=int(given["lookahead_window_size"]),
            max_ngram_size=int(given["lookahead_ngram_size"]),
            max_verification_set_size=int(given["lookahead_verification_set_size"]),
        )
    return api.DecodingConfig(**fields)


def _knobs(api: Any, given: Mapping[str, str]) -> Any:
    """Return the performance settings; None where none is given."""
    kinds = {"multi_block_mode": bool, "enable_context_fmha_fp32_acc": bool, "cuda_graph_mode": bool,
             "cuda_graph_cache_size": int}  # fmt: skip
    found = {name: given[name] for name in kinds if given.get(name)}
    if not found:
        return None
    knobs = api.ExtendedRuntimePerfKnobConfig()
    for name, value in found.items():
        setattr(knobs, name, value == "true" if kinds[name] is bool else int(value))
    return knobs


def _numbers(given: Mapping[str, str], kind: Any, **names: str) -> dict[str, Any]:
    """Return the fields whose parameter is given; 0 is taken for not given, as the C++ backend does."""
    return {field: kind(given[name]) for field, name in names.items() if given.get(name) and float(given[name])}


def make_request(
    api: Any, request: RuntimeRequest, sequence: int, model_ends: tuple[int, ...] = (), vocabulary: int = 0
) -> Any:
    """Return the `Request` of one sequence.

    Args:
        model_ends: The tokens that end the model's own texts.
        vocabulary: The logits of a token, with the engine's padding.

    Raises:
        Refused: The executor cannot do what the request asks for.
    """
    ends = _ends(request, model_ends)
    words = _words(request, ends)
    if request.min_tokens:
        # stop words end a sequence at any length; those of one token are looked for here instead
        words = [word for word in words if len(word) > 1]
    fields: dict[str, Any] = {
        "input_token_ids": request.input_ids.reshape(-1).tolist(),
        "max_tokens": request.max_new_tokens,
        "streaming": True,
        "sampling_config": _sampling_config(api, request, sequence, bool(ends)),
        "output_config": api.OutputConfig(
            return_log_probs=request.log_probs, exclude_input_from_output=True, return_perf_metrics=True
        ),
        "pad_id": ends[0] if ends else 0,
    }
    if ends:
        fields["end_id"] = ends[0]
    if words:
        fields["stop_words"] = words
    if request.bad_words:
        fields["bad_words"] = request.bad_words
    if request.embedding_bias is not None:
        fields["embedding_bias"] = as_tensor(request.embedding_bias, vocabulary)
    if request.adapter:
        # its weights are loaded when the engine is
        fields["lora_config"] = api.LoraConfig(task_id=request.adapter)
    if request.cache_salt:
        fields["cache_salt_id"] = request.cache_salt
    if request.guide is not None:
        fields["guided_decoding_params"] = _guide(api, *request.guide)
    return api.Request(**fields)


def _ends(request: RuntimeRequest, model_ends: tuple[int, ...]) -> list[int]:
    """Return the tokens that end the text, first the one that `min_tokens` withholds: the tokenizer's own, which comes
    first on the card.
    """
    known = [one for one in model_ends if one in request.end_ids]
    return [*known, *sorted(request.end_ids.difference(known))]


def _words(request: RuntimeRequest, ends: list[int]) -> list[list[int]]:
    """Return all that ends a sequence besides the first of `ends`."""
    return [*([one] for one in ends[1:]), *request.stop_words]


def _sampling_config(api: Any, request: RuntimeRequest, sequence: int, ends: bool) -> Any:
    sampling = request.sampling
    fields: dict[str, Any] = {
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        # without an end of text the penalty would be written to logits[-1] (kernels/penaltyKernels.cu)
        "min_tokens": request.min_tokens if ends and request.min_tokens else None,
    }
    if sampling.greedy:
        fields["top_k"] = 1
    else:
        fields |= {
            "temperature": sampling.temperature,
            # never None: the defaults are 0 for both, which is the most likely token
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p or None,
            "seed": None if sampling.seed is None else (sampling.seed + sequence) % 2**63,
        }
    return api.SamplingConfig(1, **{name: value for name, value in fields.items() if value is not None})


def _guide(api: Any, kind: str, guide: str) -> Any:
    kinds = api.GuidedDecodingParams.GuideType
    if kind == "json":
        return api.GuidedDecodingParams(guide_type=kinds.JSON)
    if kind == "json_schema":
        try:
            json.loads(guide)
        except ValueError as error:
            raise RequestRejectedError(f"{contract.GUIDE}: is not JSON ({error})") from None
    return api.GuidedDecodingParams(guide_type=getattr(kinds, _GUIDES[kind]), guide=guide)


def _event(event: Any) -> dict[str, Any] | None:
    """Return a KV-cache event as `KvEventTranslator` reads it; None for a kind that says nothing about names."""
    data, kind = event.data, type(event.data).__name__
    found: dict[str, Any]
    if kind == "KVCacheStoredData":
        blocks = [
            {"block_hash": one.block_hash, "tokens": [{"token_id": token.token_id} for token in one.tokens]}
            for one in data.blocks
        ]
        found = {"type": "stored", "parent_hash": data.parent_hash, "blocks": blocks}
    elif kind == "KVCacheRemovedData":
        found = {"type": "removed", "block_hashes": list(data.block_hashes)}
    elif kind == "KVCacheCreatedData":
        found = {"type": "created"}
    else:
        return None
    return {"data": found, "window_size": getattr(event, "window_size", None)}


def _sizes(model: Path) -> tuple[int, int]:
    """Return the tokens per KV-cache block and the logits per token that the engine was built with."""
    config = json.loads((model / "config.json").read_text())
    plugins = config.get("build_config", {}).get("plugin_config", {})
    pretrained = config.get("pretrained_config", {})
    vocabulary, ranks = int(pretrained.get("vocab_size") or 0), int(pretrained.get("mapping", {}).get("tp_size") or 1)
    return int(plugins.get("tokens_per_block") or _TOKENS_PER_BLOCK), -(-vocabulary // ranks) * ranks


def _kv_names(tokens_per_block: int) -> KvEventTranslator | None:
    """None where this Python lacks the hash that names blocks: the cache is not reported then."""
    try:
        from ..kv_events import KvEventTranslator
    except ModuleNotFoundError:
        return None
    return KvEventTranslator(tokens_per_block)
