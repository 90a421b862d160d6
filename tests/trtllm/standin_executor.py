"""A stand-in for `tensorrt_llm.bindings.executor` of 1.2.1, as strict as the C++ executor and nothing kinder.

docs/tensorrt-llm-calls.md is its specification, with upstream's files. It counts as the stand-in of the LLM API does:
prompt[-1]+1, +2, …; with an adapter +2, +4, …; a token of 666 fails the request, 510 breaks CUDA for good. Each
`await_responses` brings the answers of two iterations, because the executor runs on while nobody waits for it.
"""

import datetime
import enum
import json
import os
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

_UNSET: Any = object()


def _check(condition: bool, message: str) -> None:
    """TLLM_CHECK_WITH_INFO: a RuntimeError in Python."""
    if not condition:
        raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: {message}")


class _Bound:
    """A class of the bindings: keyword arguments that it has, of the types that they have; anything else is a
    TypeError, as nanobind raises it.
    """

    fields: ClassVar[dict[str, Any]] = {}
    positional: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        if len(args) > len(self.positional) or given.keys() - self.fields.keys():
            raise TypeError(f"{type(self).__name__}(): incompatible function arguments: {sorted(given)}")
        for name, (kinds, default) in self.fields.items():
            value = given.get(name, default)
            if value is _UNSET or (name in given and not _fits(value, kinds)):
                raise TypeError(f"{type(self).__name__}(): incompatible function arguments: {name}={value!r}")
            setattr(self, name, value)


def _fits(value: Any, kinds: Any) -> bool:
    if isinstance(value, bool):
        return kinds is bool or (isinstance(kinds, tuple) and bool in kinds)
    allowed = (*kinds, int) if isinstance(kinds, tuple) and float in kinds else kinds
    return isinstance(value, (float, int) if allowed is float else allowed)


_NONE = type(None)
_INT, _FLOAT = ((int, _NONE), None), ((float, _NONE), None)


ModelType = enum.Enum("ModelType", {"DECODER_ONLY": 0})
CapacitySchedulerPolicy = enum.Enum(
    "CapacitySchedulerPolicy", ["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"], start=0
)
FinishReason = enum.Enum("FinishReason", {"NOT_FINISHED": 0, "END_ID": 1, "STOP_WORDS": 2, "LENGTH": 3, "CANCELLED": 5})


class DecodingMode:
    def __init__(self, name: str) -> None:
        self.name = name

    @staticmethod
    def Lookahead() -> "DecodingMode":
        return DecodingMode("Lookahead")

    @staticmethod
    def TopKTopP() -> "DecodingMode":
        return DecodingMode("TopKTopP")


class SchedulerConfig(_Bound):
    fields: ClassVar[dict[str, Any]] = {
        "capacity_scheduler_policy": (CapacitySchedulerPolicy, CapacitySchedulerPolicy.GUARANTEED_NO_EVICT)
    }
    positional = ("capacity_scheduler_policy",)


class KvCacheConfig(_Bound):
    fields: ClassVar[dict[str, Any]] = {
        "enable_block_reuse": (bool, True), "max_tokens": _INT, "max_attention_window": ((list, _NONE), None),
        "sink_token_length": _INT, "free_gpu_memory_fraction": _FLOAT, "host_cache_size": _INT,
        "onboard_blocks": (bool, True), "event_buffer_max_size": (int, 0), "enable_partial_reuse": (bool, True),
        "copy_on_partial_reuse": (bool, True),
    }  # fmt: skip


class PeftCacheConfig(_Bound):
    fields: ClassVar[dict[str, Any]] = {
        "optimal_adapter_size": (int, 8), "max_adapter_size": (int, 64), "device_cache_percent": _FLOAT,
        "host_cache_size": _INT, "lora_prefetch_dir": ((str, _NONE), None),
    }  # fmt: skip


class LookaheadDecodingConfig(_Bound):
    fields: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("max_window_size", "max_ngram_size", "max_verification_set_size"), (int, _UNSET)
    )


class DecodingConfig(_Bound):
    fields: ClassVar[dict[str, Any]] = {
        "decoding_mode": ((DecodingMode, _NONE), None),
        "lookahead_decoding_config": ((LookaheadDecodingConfig, _NONE), None),
    }


class ExtendedRuntimePerfKnobConfig(_Bound):
    fields: ClassVar[dict[str, Any]] = {"multi_block_mode": (bool, True), "enable_context_fmha_fp32_acc": (bool, False)}
    cuda_graph_mode, cuda_graph_cache_size = False, 0


class GuidedDecodingConfig(_Bound):
    GuidedDecodingBackend = enum.Enum("GuidedDecodingBackend", {"XGRAMMAR": 0})
    fields: ClassVar[dict[str, Any]] = {
        "backend": (GuidedDecodingBackend, _UNSET), "encoded_vocab": ((list, _NONE), None),
        "tokenizer_str": ((str, _NONE), None), "stop_token_ids": ((list, _NONE), None),
    }  # fmt: skip


class GuidedDecodingParams(_Bound):
    GuideType = enum.Enum("GuideType", ["JSON", "JSON_SCHEMA", "REGEX", "EBNF_GRAMMAR"], start=0)
    fields: ClassVar[dict[str, Any]] = {"guide_type": (GuideType, _UNSET), "guide": ((str, _NONE), None)}


class ExecutorConfig(_Bound):
    fields: ClassVar[dict[str, Any]] = {
        "max_beam_width": (int, 1), "scheduler_config": (SchedulerConfig, SchedulerConfig()),
        "kv_cache_config": (KvCacheConfig, KvCacheConfig()), "enable_chunked_context": (bool, False),
        "normalize_log_probs": (bool, True), "iter_stats_max_iterations": (int, 1000), "max_batch_size": _INT,
        "peft_cache_config": ((PeftCacheConfig, _NONE), None), "decoding_config": ((DecodingConfig, _NONE), None),
        "gpu_weights_percent": (float, 1.0), "recv_poll_period_ms": (int, 0),
        "extended_runtime_perf_knob_config": ((ExtendedRuntimePerfKnobConfig, _NONE), None),
        "guided_decoding_config": ((GuidedDecodingConfig, _NONE), None),
    }  # fmt: skip
    positional = ("max_beam_width",)


class LoraConfig(_Bound):
    fields: ClassVar[dict[str, Any]] = {"task_id": (int, _UNSET), "weights": (_NONE, None), "config": (_NONE, None)}


class SamplingConfig(_Bound):
    """executor/samplingConfig.cpp checks the ranges when one is made."""

    fields: ClassVar[dict[str, Any]] = {
        "beam_width": (int, 1), "top_k": _INT, "top_p": _FLOAT, "seed": _INT, "temperature": _FLOAT, "min_tokens": _INT,
        "repetition_penalty": _FLOAT, "presence_penalty": _FLOAT, "frequency_penalty": _FLOAT, "min_p": _FLOAT,
    }  # fmt: skip
    positional = ("beam_width",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self.top_k is None or self.top_k >= 0, "topK >= 0")
        _check(self.top_p is None or 0 < self.top_p <= 1, "topP > 0 && topP <= 1")
        _check(self.temperature is None or self.temperature >= 0, "temperature >= 0")
        _check(self.repetition_penalty is None or self.repetition_penalty > 0, "repetitionPenalty > 0")
        _check(self.min_tokens is None or self.min_tokens >= 0, "minTokens >= 0")


class OutputConfig(_Bound):
    fields: ClassVar[dict[str, Any]] = {
        "return_log_probs": (bool, False), "return_context_logits": (bool, False),
        "return_generation_logits": (bool, False), "exclude_input_from_output": (bool, False),
        "return_encoder_output": (bool, False), "return_perf_metrics": (bool, False),
    }  # fmt: skip


class Request(_Bound):
    fields: ClassVar[dict[str, Any]] = {
        "input_token_ids": (list, _UNSET), "max_tokens": (int, _UNSET), "streaming": (bool, False),
        "sampling_config": (SamplingConfig, SamplingConfig()), "output_config": (OutputConfig, OutputConfig()),
        "end_id": _INT, "pad_id": _INT, "bad_words": ((list, _NONE), None), "stop_words": ((list, _NONE), None),
        "embedding_bias": ((object,), None), "lora_config": ((LoraConfig, _NONE), None),
        "guided_decoding_params": ((GuidedDecodingParams, _NONE), None), "client_id": _INT,
        "lookahead_config": ((LookaheadDecodingConfig, _NONE), None), "cache_salt_id": _INT,
    }  # fmt: skip
    positional = ("input_token_ids", "max_tokens")
    cache_salt_id: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bias = self.embedding_bias
        if bias is not None and type(bias).__module__.split(".")[0] != "torch":
            raise TypeError("Request(): incompatible function arguments: embedding_bias")
        _check(bool(self.input_token_ids), "!inputTokenIds.empty()")
        _check(self.max_tokens > 0, "maxNewTokens > 0")


class Response:
    def __init__(self, request_id: int, error: str = "", result: Any = None) -> None:
        self.request_id, self._error, self._result = request_id, error, result

    def has_error(self) -> bool:
        return bool(self._error)

    @property
    def error_msg(self) -> str:
        _check(bool(self._error), "This response does not have an error")
        return self._error

    @property
    def result(self) -> Any:
        _check(not self._error, "This response has an error")
        return self._result


class _Running:
    """A request within the executor. `prompt` grows by what is generated; `told` counts what was answered."""

    def __init__(self, number: int, request: Request) -> None:
        self.number, self.request = number, request
        self.new: list[int] = []
        self.told = 0
        self.log_probs: list[float] = []
        self.reused = 0
        self.step = 2 if request.lora_config is not None else 1


class KVCacheEventManager:
    """batch_manager/kvCacheEventManager.cpp. Its binding holds the interpreter's lock while it waits
    (nanobind/executor/bindings.cpp), and without a timeout it waits for good.
    """

    def __init__(self, limit: int) -> None:
        self._events: deque[Any] = deque(maxlen=limit or None)
        self._limit, self._number = limit, 0

    def get_latest_events(self, timeout_ms: float | None = None) -> list[Any]:
        assert timeout_ms == 0, "every thread of this process would stand still"
        events = list(self._events)
        self._events.clear()
        return events

    def add(self, kind: str, **fields: Any) -> None:
        if self._limit:
            data = type(f"KVCache{kind}Data", (SimpleNamespace,), {})(**fields)
            self._events.append(SimpleNamespace(event_id=self._number, data=data, window_size=100))
            self._number += 1


class Executor:
    """`ranks` is what the engine's config.json says; every rank makes one, and the first answers (leader mode)."""

    made: ClassVar[list["Executor"]] = []

    def __init__(self, model_path: Any, model_type: ModelType, executor_config: ExecutorConfig) -> None:
        if not isinstance(model_path, (str, Path)) or model_type is not ModelType.DECODER_ONLY:
            raise TypeError("Executor(): incompatible function arguments")
        self.path, self.config = Path(model_path), executor_config
        if not (self.path / "config.json").is_file():
            raise RuntimeError(f"Error opening engine file: {self.path / 'config.json'}")
        config = json.loads((self.path / "config.json").read_text())
        mapping = config.get("pretrained_config", {}).get("mapping", {})
        ranks = mapping.get("tp_size", 1) * mapping.get("pp_size", 1)
        self.rank, world = (int(os.environ.get(f"OMPI_COMM_WORLD_{name}", default))
                            for name, default in (("RANK", 0), ("SIZE", 1)))  # fmt: skip
        _check(world == ranks, "With communicationMode kLEADER, MPI worldSize is expected to be equal to tp*pp*cp when "
                               "participantIds are not specified")  # fmt: skip
        self._meet(world)
        self.ranks, self.vocab_size = ranks, config.get("pretrained_config", {}).get("vocab_size", 0)
        self.size = config.get("build_config", {}).get("plugin_config", {}).get("tokens_per_block", 32)
        self.max_input_len = 100
        self.manager = KVCacheEventManager(executor_config.kv_cache_config.event_buffer_max_size)
        self.manager.add("Created", num_blocks_per_cache_level=[100, 0])
        self._active: dict[int, _Running] = {}
        self._cancelled: set[int] = set()
        self._ready: list[Response] = []
        self._stats: deque[Any] = deque(maxlen=executor_config.iter_stats_max_iterations)
        self._blocks: dict[tuple[int, ...], int] = {}
        self._number = 0
        self._iteration = 0
        self.down = self.broken = False
        Executor.made.append(self)

    def _meet(self, world: int) -> None:
        """The communicator of the ranks is made by all of them together (executorImpl.cpp, initializeWorkers)."""
        (self.path / f"met{self.rank}").touch()
        while not all((self.path / f"met{rank}").exists() for rank in range(world)):
            time.sleep(0.01)

    def can_enqueue_requests(self) -> bool:
        return not self.down and self.rank == 0

    def _leader(self) -> None:
        _check(not self.down, "Shutdown called")
        _check(self.rank == 0, "Executor API may only be called by the leader in LEADER communication mode")

    def enqueue_request(self, request: Request) -> int:
        self._leader()
        self._number += 1
        _check(not request.sampling_config.min_tokens or (request.end_id or -1) >= 0,
               "the minimum-length penalty writes logits[endId], and -1 is not in the vocabulary")  # fmt: skip
        if len(request.input_token_ids) > self.max_input_len:
            self._refuse(f"Prompt length ({len(request.input_token_ids)}) exceeds maximum input length (100).")
        elif request.guided_decoding_params is not None and self.config.guided_decoding_config is None:
            self._refuse("Request is specified with GuidedDecodingParams, but GuidedDecoder is not setup.")
        else:
            self._active[self._number] = _Running(self._number, request)
        return self._number

    def _refuse(self, reason: str) -> None:
        """executor/executorImpl.cpp, fetchNewRequests: an error of this request alone."""
        text = f"Encountered an error when fetching new request: [TensorRT-LLM][ERROR] Assertion failed: {reason}"
        self._ready.append(Response(self._number, text))

    def cancel_request(self, number: int) -> None:
        self._leader()
        self._cancelled.add(number)

    def await_responses(self, timeout: datetime.timedelta | None = None) -> list[Response]:
        """Waits for good without a timeout, so that one is expected here."""
        self._leader()
        if not isinstance(timeout, datetime.timedelta):
            raise TypeError("await_responses(): incompatible function arguments")
        if not self._active and not self._ready:
            time.sleep(timeout.total_seconds())
        for _ in range(2):
            if self._active:
                self._iterate()
        ready, self._ready = self._ready, []
        return ready

    def _iterate(self) -> None:
        time.sleep(0.001)
        self._iteration += 1
        fresh = [one for one in self._active.values() if not one.told and not one.new]
        for one in fresh:
            if wrong := self._wrong_bias(one.request.embedding_bias):
                self._end_all(f"[TensorRT-LLM][ERROR] Assertion failed: {wrong}")
                return
            self._prefill(one)
        for one in list(self._active.values()):
            if one.number in self._cancelled:
                self._cancelled.discard(one.number)
                del self._active[one.number]
                self._answer(one, [], FinishReason.CANCELLED)
            else:
                self._decode(one)
        self._stats.append(self._statistics(fresh))

    def _wrong_bias(self, bias: Any) -> str:
        """batch_manager/createNewDecoderRequests.cpp (initializeEmbeddingBias) wants `vocab_size` numbers, and copies
        them to a buffer that runtime/decoderState.cpp (reshapeBuffers) pads to a multiple of all ranks.
        """
        padded = -(-self.vocab_size // self.ranks) * self.ranks
        if bias is None or len(bias) == self.vocab_size == padded:
            return ""
        if len(bias) != self.vocab_size:
            return f"Expected last dimension to be same as vocab size: {self.vocab_size}."
        return f"Incompatible buffer sizes: {4 * len(bias)} != {4 * padded}"

    def _end_all(self, error: str) -> None:
        """executor/executorImpl.cpp, terminateActiveRequests: one error of a step ends everything that is active."""
        text = f"Encountered an error in forwardAsync function: {error}"
        self._ready += [Response(number, text) for number in self._active]
        self._active.clear()

    def _prefill(self, one: _Running) -> None:
        """The last prompt token is never taken from the cache (kvCacheManager.cpp, addSequence)."""
        prompt, size = one.request.input_token_ids, self.size
        cache = self.config.kv_cache_config
        if not cache.enable_block_reuse:
            return
        adapter = one.request.lora_config.task_id if one.request.lora_config else 0
        salt = (getattr(one.request, "cache_salt_id", None) or 0, adapter)
        usable = len(prompt) - 1
        while (one.reused + 1) * size <= usable and (*salt, *prompt[: (one.reused + 1) * size]) in self._blocks:
            one.reused += 1
        matched = prompt[: one.reused * size]
        if cache.enable_partial_reuse and usable > len(matched):
            # a block that begins with the same token is copied, and counts as a whole one
            begun = (*salt, *prompt[: len(matched) + 1])
            one.reused += any(name[: len(begun)] == begun and len(name) > len(begun) for name in self._blocks)
        for end in range(size, len(prompt) + 1, size):
            name, before = (*salt, *prompt[:end]), (*salt, *prompt[: end - size])
            if name not in self._blocks:
                self._blocks[name] = hash(name) & (2**63 - 1)
                tokens = [SimpleNamespace(token_id=token, token_extra_id=0) for token in prompt[end - size : end]]
                block = SimpleNamespace(block_hash=self._blocks[name], tokens=tokens, lora_id=None, cache_level=0,
                                        priority=35)  # fmt: skip
                self.manager.add("Stored", parent_hash=self._blocks.get(before), blocks=[block])

    def _decode(self, one: _Running) -> None:
        request = one.request
        if one.number not in self._active:
            return
        token = request.input_token_ids[-1] + one.step * (len(one.new) + 1)
        if token == 510:
            self.broken = True
        if token == 666 or self.broken:
            why = "an illegal memory access was encountered" if self.broken else "out of memory"
            self._end_all(f"CUDA runtime error in x: {why}")
            return
        while [token] in (request.bad_words or []):
            token += 1
        one.new.append(token)
        one.log_probs.append(-token / 100 if not self.config.normalize_log_probs else 0.0)
        reason = self._ended(one, token)
        if reason is FinishReason.END_ID:
            # kernels/samplingTopKKernels.cu: "Do not increase seq len when EOS is generated."
            del one.new[-1], one.log_probs[-1]
        if reason is not FinishReason.NOT_FINISHED:
            del self._active[one.number]
        if request.streaming or reason is not FinishReason.NOT_FINISHED:
            self._answer(one, one.new[one.told :], reason)
            one.told = len(one.new)

    def _ended(self, one: _Running, token: int) -> FinishReason:
        """`min_tokens` withholds `end_id` alone; stop words of any length end a sequence, and stay in it."""
        request = one.request
        if token == request.end_id and len(one.new) > (request.sampling_config.min_tokens or 0):
            return FinishReason.END_ID
        if any(one.new[-len(word) :] == word for word in request.stop_words or []):
            return FinishReason.STOP_WORDS
        return FinishReason.LENGTH if len(one.new) >= request.max_tokens else FinishReason.NOT_FINISHED

    def _answer(self, one: _Running, tokens: list[int], reason: FinishReason) -> None:
        """batch_manager/llmRequest.cpp, createResult: new tokens, and the whole answer's log-probabilities."""
        config, done = one.request.output_config, reason is not FinishReason.NOT_FINISHED
        head = [] if config.exclude_input_from_output or one.request.streaming else one.request.input_token_ids
        metrics = SimpleNamespace(kv_cache_metrics=SimpleNamespace(num_reused_blocks=one.reused))
        result = SimpleNamespace(
            is_final=done, is_sequence_final=done, sequence_index=0, output_token_ids=[[*head, *tokens]],
            log_probs=[list(one.log_probs)] if config.return_log_probs else None,
            cum_log_probs=[sum(one.log_probs)] if config.return_log_probs else None, finish_reasons=[reason],
            request_perf_metrics=metrics if config.return_perf_metrics else None,
        )  # fmt: skip
        self._ready.append(Response(one.number, result=result))

    def _statistics(self, fresh: list[_Running]) -> Any:
        used = len(self._blocks)
        # before #15075, every block in host memory counts as used
        host = 400 if self.config.kv_cache_config.host_cache_size else 0
        cache = SimpleNamespace(max_num_blocks=100 + host, used_num_blocks=used + host, free_num_blocks=100 - used,
                                tokens_per_block=self.size, reused_blocks=3)  # fmt: skip
        prefilled = sum(len(one.request.input_token_ids) - one.reused * self.size for one in fresh)
        batch = SimpleNamespace(num_scheduled_requests=len(self._active), num_context_requests=len(fresh),
                                num_ctx_tokens=prefilled, num_paused_requests=2)  # fmt: skip
        return SimpleNamespace(
            iter=self._iteration, iter_latency_ms=1.0, num_active_requests=len(self._active), num_queued_requests=0,
            gpu_mem_usage=5000, cpu_mem_usage=600, pinned_mem_usage=70, kv_cache_stats=cache,
            inflight_batching_stats=batch,
        )  # fmt: skip

    def get_latest_iteration_stats(self) -> deque[Any]:
        self._leader()
        stats, self._stats = self._stats, deque(maxlen=self._stats.maxlen)
        return stats

    def get_kv_cache_event_manager(self) -> KVCacheEventManager | None:
        return self.manager

    def shutdown(self) -> None:
        """The leader tells the others to end; theirs blocks until then. A second call does nothing."""
        ended = self.path / "terminated"
        while self.rank and not ended.exists():
            time.sleep(0.01)
        if not self.rank:
            ended.touch()
        self.down = True
