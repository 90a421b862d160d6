"""The engine runtime for TensorRT engines.

The runtime uses `tensorrt_llm.bindings.executor`, the library of NVIDIA's Triton backend.

The executor schedules and generates in a thread of its own: `enqueue_request` hands a request over,
and `await_responses` returns the tokens since the last call. An engine of several GPUs has one
process per GPU under mpirun, each with an executor. The first process is the leader, which takes
requests and returns responses. docs/tensorrt-llm-calls.md lists each call with its defaults and
exceptions.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llmops_contract as contract

from ..engine_runtime import (
    ENGINE_FAILED,
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
from ..request import RuntimeRequest, check_json
from .remote import PYTHON_VARIABLE, RemoteRuntime
from .stop_words import StopWordMatcher
from .trtllm_library import (
    EVENTS_KEPT,
    NO_WAIT,
    GpuBlocks,
    as_tensor,
    check_grammar,
    check_guided_end,
    is_fatal_cuda_error,
    kv_event_translator,
    leave_mpi_job,
    ordered_end_ids,
    restrict_visible_gpus,
    sampling_fields,
)

if TYPE_CHECKING:
    from ..kv_events import KvEventTranslator

#: Tokens per KV-cache block if the engine's config.json does not name the size: the default of
#: trtllm-build.
_TOKENS_PER_BLOCK = 32
_REASONS = {"END_ID": STOP, "STOP_WORDS": STOP, "LENGTH": LENGTH}
#: Prefix of errors that end one request. Other errors end all running requests, or come from the
#: adapter cache (executor/executorImpl.cpp, fetchNewRequests and terminateActiveRequests).
_REQUEST_ERROR = "Encountered an error when fetching new request"
_GUIDES = {
    "json": "JSON",
    "json_schema": "JSON_SCHEMA",
    "regex": "REGEX",
    "ebnf_grammar": "EBNF_GRAMMAR",
}
_DECODING_MODES = {"top_k_top_p": "TopKTopP", "lookahead": "Lookahead"}


@dataclass(frozen=True)
class ExecutorOptions:
    """The options of one engine.

    `model` is the engine's folder. `parameters` are the parameters of NVIDIA's C++ backend, as in
    config.pbtxt. `ranks` is the number of GPUs. `end_ids` are the model's end-of-text token ids.
    """

    model: str
    ranks: int
    max_batch_size: int
    parameters: Mapping[str, str]
    end_ids: tuple[int, ...] = ()


def create(parameters: dict[str, str], metadata: dict[str, Any]) -> EngineRuntime:
    """Start the engine in this process, or in one process per GPU under mpirun.

    mpirun is used if the engine needs several GPUs.
    """
    leave_mpi_job()
    restrict_visible_gpus(parameters.get("gpu_device_ids", ""))
    options = ExecutorOptions(
        model=parameters["gpt_model_path"],
        ranks=int(parameters["world_size"]),
        max_batch_size=metadata["max_batch_size"],
        parameters=parameters,
        end_ids=tuple(metadata["end_ids"]),
    )
    python = os.environ.get(PYTHON_VARIABLE)
    if python or options.ranks > 1:
        return RemoteRuntime(python or sys.executable, options, "executor", options.ranks)
    return ExecutorRuntime(options, _library())


def start(fields: dict[str, Any]) -> ExecutorRuntime:
    """Load this process's rank of the engine. `fields` are the fields of ExecutorOptions."""
    return ExecutorRuntime(ExecutorOptions(**fields), _library())


def _library() -> Any:
    return importlib.import_module("tensorrt_llm.bindings.executor")


class _Sequence:
    """A sequence in the executor, identified by the request id that the executor gave it."""

    __slots__ = ("log_probs", "matcher", "prompt_tokens", "request_id", "started")

    def __init__(self, request_id: int, request: RuntimeRequest, model_ends: tuple[int, ...]) -> None:
        self.request_id = request_id
        self.log_probs = request.log_probs
        self.prompt_tokens = int(request.input_ids.size)
        self.started = False
        words = [word for word in _words(request, ordered_end_ids(request, model_ends)) if len(word) == 1]
        self.matcher = StopWordMatcher(words, request.min_tokens) if words and request.min_tokens else None


class ExecutorRuntime(EngineRuntime):
    """One rank of an engine. `is_leader` is True for the rank that takes requests.

    `step_wait` is the maximum time in seconds that a step waits for its first token.
    """

    step_wait = 0.05

    def __init__(self, options: ExecutorOptions, library: Any) -> None:
        self._api = library
        self._options = options
        # added by NVIDIA/TensorRT-LLM #7106, which is not in release 1.0
        self._has_salts = hasattr(library.Request, "cache_salt_id")
        self._tokens_per_block, self._vocab_size = _engine_sizes(Path(options.model))
        config = executor_config(library, options.parameters, options.max_batch_size)
        self._executor = library.Executor(Path(options.model), library.ModelType.DECODER_ONLY, config)
        self.is_leader: bool = self._executor.can_enqueue_requests()
        self._sequences: dict[int, _Sequence] = {}
        self._keys: dict[int, int] = {}
        self._latest: Any = None
        self._prefilled = 0
        self._gpu_blocks = GpuBlocks(has_host_blocks=bool(config.kv_cache_config.host_cache_size))
        # with attention windows, the library's number of blocks is a sum over the windows
        self._counts_blocks = not options.parameters.get("max_attention_window_size")
        reuses = config.kv_cache_config.enable_block_reuse
        self._manager = self._executor.get_kv_cache_event_manager() if self.is_leader and reuses else None
        self._translator: KvEventTranslator | None = (
            kv_event_translator(self._tokens_per_block) if self._manager is not None else None
        )

    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        if not self._has_salts:
            request = replace(request, cache_salt=0)
        executor_request = make_request(
            self._api, request, sequence=sequence, model_ends=self._options.end_ids, vocab_size=self._vocab_size
        )
        if self._translator is not None:
            self._translator.expect_request(request.input_ids.reshape(-1), request.cache_salt, request.adapter)
        request_id = self._executor.enqueue_request(executor_request)
        self._sequences[key] = _Sequence(request_id, request, self._options.end_ids)
        self._keys[request_id] = key

    def cancel(self, key: int) -> None:
        sequence = self._forget(key)
        if sequence is not None:
            self._executor.cancel_request(sequence.request_id)

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> Iterable[StepOutput]:
        try:
            responses = self._executor.await_responses(timeout=datetime.timedelta(seconds=self.step_wait))
            self._read_stats()
        except RuntimeError as error:
            raise DeadEngineError(f"TensorRT-LLM: {error}") from error
        return [output for output in map(self._read, responses) if output is not None]

    def _read(self, response: Any) -> StepOutput | None:
        key = self._keys.get(response.request_id)
        if response.has_error():
            return self._failed(key, str(response.error_msg))
        if key is None:
            # ignore the final response of a request that was cancelled
            return None
        sequence, result = self._sequences[key], response.result
        tokens: list[int] = list(result.output_token_ids[0])
        # the response has only the new tokens, but the log-probabilities of the whole answer
        # (llmRequest.cpp, createResult)
        log_probs = list(result.log_probs[0][-len(tokens) :]) if sequence.log_probs and tokens else []
        finish = _REASONS.get(result.finish_reasons[0].name, LENGTH) if result.is_final else RUNNING
        cached = None if sequence.started else self._cached_tokens(sequence, result)
        sequence.started = True
        kept = sequence.matcher.find(tokens) if sequence.matcher is not None else None
        if kept is not None:
            self.cancel(key) if finish == RUNNING else self._forget(key)
            return StepOutput(key, tokens[:kept], log_probs[:kept], STOP, cached=cached)
        if finish != RUNNING:
            self._forget(key)
        return StepOutput(key, tokens, log_probs, finish, cached=cached)

    def _failed(self, key: int | None, error: str) -> StepOutput | None:
        if is_fatal_cuda_error(error):
            raise DeadEngineError(f"TensorRT-LLM: {error}")
        if key is None:
            return None
        self._forget(key)
        cause = contract.INPUT_IDS if error.startswith(_REQUEST_ERROR) else ENGINE_FAILED
        return StepOutput(key, [], [], FAILED, f"{cause}: {error}")

    def _forget(self, key: int) -> _Sequence | None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._keys.pop(sequence.request_id, None)
        return sequence

    def _cached_tokens(self, sequence: _Sequence, result: Any) -> int | None:
        """Return the number of prompt tokens that came from the cache.

        The result is None if the library does not report the number. The number is exact because
        partial reuse is off: each reused block is full, or holds the entire rest of the prompt. The
        last token of a prompt is always computed.
        """
        if not self._counts_blocks or result.request_perf_metrics is None:
            return None
        blocks = int(result.request_perf_metrics.kv_cache_metrics.num_reused_blocks)
        return min(blocks * self._tokens_per_block, sequence.prompt_tokens - 1)

    def _read_stats(self) -> None:
        """Read the statistics of the iterations since the last step."""
        new = self._executor.get_latest_iteration_stats()
        batches = [one.inflight_batching_stats for one in new if one.inflight_batching_stats is not None]
        self._prefilled = sum(batch.num_ctx_tokens for batch in batches)
        if new:
            self._latest = new[-1]

    def stats(self) -> EngineStats:
        latest, active = self._latest, len(self._sequences)
        cache = getattr(latest, "kv_cache_stats", None)
        batch = getattr(latest, "inflight_batching_stats", None)
        counts = (0, 0) if cache is None else (int(cache.max_num_blocks), int(cache.used_num_blocks))
        blocks, used = self._gpu_blocks.count(*counts)
        waiting_prompts = [sequence.prompt_tokens for sequence in self._sequences.values() if not sequence.started]
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
            kv_blocks_max=blocks,
            kv_blocks_used=used,
            tokens_per_block=0 if cache is None else int(cache.tokens_per_block),
            max_requests=self._options.max_batch_size,
            kv_blocks_reused=None if cache is None else int(cache.reused_blocks),
            paused=0 if batch is None else int(batch.num_paused_requests),
            memory=tuple((kind, int(value)) for kind, value in memory.items()),
            prefilled=self._prefilled,
        )

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        if self._translator is None or self._manager is None:
            return ()
        # a timeout of 0, because the binding holds the GIL while it waits
        events = self._manager.get_latest_events(timeout_ms=NO_WAIT)
        return self._translator.translate([_event(event) for event in events])

    def close(self) -> None:
        """End the engine. Other ranks than the leader wait here until the leader ends it."""
        for key in list(self._sequences):
            self.cancel(key)
        self._executor.shutdown()


def executor_config(api: Any, parameters: Mapping[str, str], max_batch_size: int) -> Any:
    """Return the `ExecutorConfig` for the parameters of NVIDIA's C++ backend.

    The executor's defaults apply to parameters that are left out.
    """
    values: dict[str, Any] = {
        "max_beam_width": 1,
        "max_batch_size": max_batch_size,
        "scheduler_config": api.SchedulerConfig(
            capacity_scheduler_policy=getattr(api.CapacitySchedulerPolicy, parameters["batch_scheduler_policy"].upper())
        ),
        "kv_cache_config": _kv_cache_config(api, parameters),
        "enable_chunked_context": parameters["enable_chunked_context"] == "true",
        # Off by default: normalized log-probabilities are relative to the tokens that top-k and
        # top-p keep, and a greedy token's would always be 0.0.
        "normalize_log_probs": parameters.get("normalize_log_probs") == "true",
        "decoding_config": _decoding_config(api, parameters),
        **_numbers(
            parameters,
            int,
            recv_poll_period_ms="recv_poll_period_ms",
            iter_stats_max_iterations="iter_stats_max_iterations",
        ),
        **_numbers(parameters, float, gpu_weights_percent="gpu_weights_percent"),
    }
    if parameters.get("xgrammar_tokenizer_info_path"):
        info = json.loads(Path(parameters["xgrammar_tokenizer_info_path"]).read_text())
        backend = api.GuidedDecodingConfig.GuidedDecodingBackend.XGRAMMAR
        values["guided_decoding_config"] = api.GuidedDecodingConfig(backend=backend, **info)
    if parameters.get("lora_prefetch_dir"):
        values["peft_cache_config"] = api.PeftCacheConfig(
            lora_prefetch_dir=parameters["lora_prefetch_dir"],
            **_numbers(
                parameters,
                int,
                max_adapter_size="lora_cache_max_adapter_size",
                optimal_adapter_size="lora_cache_optimal_adapter_size",
                host_cache_size="lora_cache_host_memory_bytes",
            ),
            **_numbers(parameters, float, device_cache_percent="lora_cache_gpu_memory_fraction"),
        )
    config = api.ExecutorConfig(**values)
    knobs = _knobs(api, parameters)
    if knobs is not None:
        config.extended_runtime_perf_knob_config = knobs
    return config


def _kv_cache_config(api: Any, parameters: Mapping[str, str]) -> Any:
    reuse = parameters["enable_kv_cache_reuse"] == "true"
    windows = parameters.get("max_attention_window_size")
    return api.KvCacheConfig(
        enable_block_reuse=reuse,
        # without partial reuse the number of cached tokens is exact, at a cost of at most one block
        # per request
        enable_partial_reuse=False,
        event_buffer_max_size=EVENTS_KEPT if reuse else 0,
        free_gpu_memory_fraction=float(parameters["kv_cache_free_gpu_mem_fraction"]),
        **({"max_attention_window": [int(one) for one in windows.split(",")]} if windows else {}),
        **(
            {"onboard_blocks": parameters["kv_cache_onboard_blocks"] == "true"}
            if "kv_cache_onboard_blocks" in parameters
            else {}
        ),
        **_numbers(
            parameters,
            int,
            max_tokens="max_tokens_in_paged_kv_cache",
            host_cache_size="kv_cache_host_memory_bytes",
        ),
    )


def _decoding_config(api: Any, parameters: Mapping[str, str]) -> Any:
    mode = parameters["decoding_mode"]
    fields = {"decoding_mode": getattr(api.DecodingMode, _DECODING_MODES[mode])()}
    if mode == "lookahead":
        fields["lookahead_decoding_config"] = api.LookaheadDecodingConfig(
            max_window_size=int(parameters["lookahead_window_size"]),
            max_ngram_size=int(parameters["lookahead_ngram_size"]),
            max_verification_set_size=int(parameters["lookahead_verification_set_size"]),
        )
    return api.DecodingConfig(**fields)


def _knobs(api: Any, parameters: Mapping[str, str]) -> Any:
    """Return the executor's performance settings, or None if no parameter sets one."""
    kinds = {"multi_block_mode": bool, "enable_context_fmha_fp32_acc": bool, "cuda_graph_mode": bool,
             "cuda_graph_cache_size": int}  # fmt: skip
    found = {name: parameters[name] for name in kinds if parameters.get(name)}
    if not found:
        return None
    knobs = api.ExtendedRuntimePerfKnobConfig()
    for name, value in found.items():
        setattr(knobs, name, value == "true" if kinds[name] is bool else int(value))
    return knobs


def _numbers(parameters: Mapping[str, str], kind: Any, **names: str) -> dict[str, Any]:
    """Return the fields whose parameter is set.

    A whole number of 0 means "not set", as in the C++ backend (model_instance_state.cc). A share of
    0 is a value: with gpu_weights_percent 0, no weights stay on the GPU (tllmRuntime.cpp,
    setWeightStreaming). `names` has the parameter of each field. `kind` converts the parameter's
    text to a number.
    """
    found = {field: kind(parameters[name]) for field, name in names.items() if parameters.get(name)}
    return {field: number for field, number in found.items() if number or kind is float}


def make_request(
    api: Any, request: RuntimeRequest, sequence: int, model_ends: tuple[int, ...] = (), vocab_size: int = 0
) -> Any:
    """Return the executor's `Request` for one sequence.

    Args:
        api: The module of the executor's bindings.
        request: The request that the sequence belongs to.
        sequence: The index of the sequence in the request.
        model_ends: The model's end-of-text token ids.
        vocab_size: The vocabulary size in the engine's config.json.

    Raises:
        RequestRejectedError: The request needs a feature that the executor does not have.
    """
    ends = ordered_end_ids(request, model_ends)
    words = _words(request, ends)
    if request.min_tokens:
        # The executor applies stop words even before `min_tokens`. So the executor gets no stop
        # words of one token, which StopWordMatcher applies instead.
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
        fields["embedding_bias"] = as_tensor(request.embedding_bias, vocab_size)
    if request.adapter:
        # no weights are passed: the adapter's weights were loaded with the engine
        fields["lora_config"] = api.LoraConfig(task_id=request.adapter)
    if request.cache_salt:
        fields["cache_salt_id"] = request.cache_salt
    if request.guide is not None:
        check_guided_end(request, model_ends)
        fields["guided_decoding_params"] = _guide(api, *request.guide)
    return api.Request(**fields)


def _words(request: RuntimeRequest, ends: list[int]) -> list[list[int]]:
    """Return the stop words and end tokens of a request, except the first token of `ends`."""
    return [*([one] for one in ends[1:]), *request.stop_words]


def _sampling_config(api: Any, request: RuntimeRequest, sequence: int, has_end: bool) -> Any:
    fields = {
        **sampling_fields(request, sequence),
        # without an end token the library would write the penalty to logits[-1]
        # (kernels/penaltyKernels.cu)
        "min_tokens": request.min_tokens if has_end and request.min_tokens else None,
    }
    return api.SamplingConfig(1, **{name: value for name, value in fields.items() if value is not None})


def _guide(api: Any, kind: str, guide: str) -> Any:
    guide_type = getattr(api.GuidedDecodingParams.GuideType, _GUIDES[kind])
    if kind == "json":
        return api.GuidedDecodingParams(guide_type=guide_type)
    if kind == "json_schema":
        check_json(guide)
    check_grammar(kind, guide)
    return api.GuidedDecodingParams(guide_type=guide_type, guide=guide)


def _event(event: Any) -> dict[str, Any]:
    """Return a KV-cache event in the form that `KvEventTranslator` reads."""
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
        found = {"type": "updated"}
    return {"event_id": event.event_id, "data": found, "window_size": getattr(event, "window_size", None)}


def _engine_sizes(model: Path) -> tuple[int, int]:
    """Return the tokens per KV-cache block and the vocabulary size of an engine."""
    config = json.loads((model / "config.json").read_text())
    plugins = config.get("build_config", {}).get("plugin_config", {})
    vocabulary = config.get("pretrained_config", {}).get("vocab_size")
    return int(plugins.get("tokens_per_block") or _TOKENS_PER_BLOCK), int(vocabulary or 0)
