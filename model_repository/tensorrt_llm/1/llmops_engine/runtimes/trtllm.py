"""The engine runtime for checkpoints: TensorRT-LLM's LLM API (`tensorrt_llm.LLM`).

The library schedules by itself and returns results through asyncio. The results pass from the
library's event loop into a queue, which `step` empties. docs/tensorrt-llm-calls.md lists each call
into the library with its defaults, exceptions and threads.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import llmops_contract as contract

from ..engine_runtime import (
    ENGINE_FAILED,
    FAILED,
    LENGTH,
    RUNNING,
    STOP,
    Alternatives,
    DeadEngineError,
    EngineRuntime,
    EngineStats,
    KvCacheEvent,
    StepOutput,
)
from ..request import RequestRejectedError, RuntimeRequest, check_json
from .remote import PYTHON_VARIABLE, RemoteRuntime
from .stop_words import StopWordMatcher
from .trtllm_library import (
    EVENTS,
    NO_WAIT,
    GpuBlocks,
    Library,
    as_tensor,
    check_announced,
    check_grammar,
    check_guided_end,
    choose_profile,
    final_arguments,
    is_fatal_cuda_error,
    kv_event_translator,
    leave_mpi_job,
    load_library,
    ordered_end_ids,
    release,
    restrict_visible_gpus,
    sampling_fields,
)

if TYPE_CHECKING:
    from ..kv_events import KvEventTranslator

#: The library's finish reasons of complete answers. With any other reason the request fails, such
#: as "cancelled" at a shutdown and "timeout" (1.2.1 executor/result.py, _handle_sequence).
_REASONS = {"stop": STOP, "length": LENGTH}
#: Seconds between two reads of the library's statistics. The library keeps an entry per step until
#: the next read, and metrics are rarely scraped more often.
_STATS_PERIOD = 1.0
#: Seconds between two reads of the library's KV-cache events. Gateways route requests by these
#: events, so the interval is short.
_EVENTS_PERIOD = 0.1
#: Seconds between a failed read of statistics or events and the next attempt, so that a lasting
#: failure uses little CPU.
_RETRY_PERIOD = 1.0
#: Seconds that `close` waits for the readers of statistics and events to end. The readers only have
#: to handle their cancellation.
_CLOSE_TIMEOUT = 0.05
#: Log-probability of a token for which the library computed none. OpenAI's API returns the same
#: value.
_NOT_COMPUTED = -9999.0
#: Rejection of a temperature by an engine that always takes the most likely token.
GREEDY_ONLY = (
    "this engine's speculation always takes the most likely token; send temperature 0, serve MTP with "
    "TensorRT-LLM 1.3 and without use_dynamic_tree, or build the engine without "
    "speculative_config.allow_advanced_sampling=false"
)
#: Beginnings of the messages of CUDA errors, from torch and from the library's own code (1.2.1
#: cpp/include/tensorrt_llm/common/cudaUtils.h, check).
_CUDA = ("CUDA error: ", "[TensorRT-LLM][ERROR] CUDA runtime error in ")
_MEMORY = {"cpu": "cpuMemUsage", "gpu": "gpuMemUsage", "pinned": "pinnedMemUsage"}


@dataclass(frozen=True)
class TrtllmOptions:
    """The options of one engine.

    `model` and `tokenizer` are folders. `profiles` are the LLM-API arguments for each release line
    of TensorRT-LLM. `end_ids` are the model's end-of-text token ids.
    `capabilities` are the capabilities that the repository announces to gateways. Each LoRA adapter
    of `adapters` has `id`, `name` and `path`.
    """

    model: str
    tokenizer: str
    profiles: list[dict[str, Any]]
    max_batch_size: int
    end_ids: tuple[int, ...] = ()
    capabilities: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[dict[str, Any], ...] = ()


def create(parameters: dict[str, str], metadata: dict[str, Any]) -> EngineRuntime:
    """Start the engine in this process, or under the Python that has the library."""
    leave_mpi_job()
    restrict_visible_gpus(parameters.get("gpu_device_ids", ""))
    options = TrtllmOptions(
        model=parameters["gpt_model_path"],
        tokenizer=metadata["tokenizer_dir"],
        profiles=json.loads(parameters["llm_profiles"]),
        max_batch_size=metadata["max_batch_size"],
        end_ids=tuple(metadata["end_ids"]),
        capabilities=metadata["capabilities"],
        adapters=tuple(json.loads(parameters.get("lora_adapters", "[]"))),
    )
    python = os.environ.get(PYTHON_VARIABLE)
    return RemoteRuntime(python, options, "trtllm") if python else TrtllmRuntime(options)


def start(fields: dict[str, Any]) -> TrtllmRuntime:
    """Load the model in this process. `fields` are the fields of TrtllmOptions."""
    return TrtllmRuntime(TrtllmOptions(**fields))


class _Sequence:
    """A sequence in the library. `alternatives` is the number of likely tokens per token."""

    __slots__ = ("alternatives", "future", "matcher", "prompt_tokens", "result", "started")

    def __init__(self, request: RuntimeRequest) -> None:
        self.future: Future[None] | None = None
        self.result: Any = None
        self.prompt_tokens = int(request.input_ids.size)
        self.started = False
        self.alternatives = request.top_log_probs
        words = _unsupported_words(request)
        self.matcher = StopWordMatcher(words, request.min_tokens) if words else None


class TrtllmRuntime(EngineRuntime):
    """A runtime that takes and returns token ids; the library neither encodes nor decodes text.

    `step_wait` is the maximum time in seconds that a step waits for its first token.
    """

    step_wait = 0.05

    def __init__(self, options: TrtllmOptions, library: Library | None = None) -> None:
        self._api = library or load_library()
        self._options = options
        self._profile = choose_profile(options.profiles, self._api.version)
        check_announced(options.capabilities, self._profile, self._api.version)
        arguments = final_arguments(self._api, self._profile, options.model, options.tokenizer)
        self._llm = self._api.LLM(**arguments)
        self._adapters = {
            adapter["id"]: self._api.LoRARequest(adapter["name"], adapter["id"], adapter["path"])
            for adapter in options.adapters
        }
        self._sequences: dict[int, _Sequence] = {}
        self._outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self._death_reason = ""
        self._iteration = 0
        self._latest: dict[str, Any] = {}
        self._readers: list[Future[None]] = []
        self._translator: KvEventTranslator | None = None
        self._kv_events: queue.SimpleQueue[KvCacheEvent] = queue.SimpleQueue()
        self._guide_backend = arguments.get("guided_decoding_backend")
        self._has_salts = "cache_salt" in inspect.signature(self._api.LLM.generate_async).parameters
        self._tokens_per_block = _reported_block_size(arguments)
        # with attention DP each rank has a cache, and the library reports the statistics of the
        # first rank (1.2.1 and 1.3 _torch/pyexecutor/py_executor.py)
        self._caches = int(arguments.get("tensor_parallel_size") or 1) if arguments.get("enable_attention_dp") else 1
        has_host_blocks = bool(_cache_field(arguments, "host_cache_size", 0)) and release(self._api.version) < (1, 3)
        self._gpu_blocks = GpuBlocks(has_host_blocks=has_host_blocks)
        self._with_stats = bool(arguments.get("enable_iter_perf_stats"))
        self._logged_failures: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trtllm", daemon=True)
        self._thread.start()

    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        if self._profile["greedy_only"] and not request.sampling.greedy:
            raise RequestRejectedError(f"{contract.TEMPERATURE}: {GREEDY_ONLY}")
        params = sampling_params(self._api, request, sequence, self._profile["log_probs"], self._options.end_ids)
        if request.guide is not None and self._guide_backend:
            check_guided_end(request)
            check_grammar(*request.guide, self._guide_backend)
        state = self._sequences[key] = _Sequence(request)
        self._start_readers()
        state.future = asyncio.run_coroutine_threadsafe(self._generate(key, state, request, params), self._loop)

    def _start_readers(self) -> None:
        """Start reading statistics and events. Before the first request the library has none."""
        if self._readers:
            return
        self._translator = kv_event_translator(self._tokens_per_block) if self._tokens_per_block else None
        readers = (
            [self._read_periodically("statistics", "get_stats", self._keep_stats, _STATS_PERIOD)]
            if self._with_stats
            else []
        )
        if self._translator is not None:
            readers.append(
                self._read_periodically("KV-cache events", "get_kv_cache_events", self._keep_events, _EVENTS_PERIOD)
            )
        self._readers = [asyncio.run_coroutine_threadsafe(reader, self._loop) for reader in readers]

    async def _generate(self, key: int, state: _Sequence, request: RuntimeRequest, params: Any) -> None:
        """Generate one sequence.

        Runs on the library's event loop, because `generate_async` binds the result to the running
        loop.
        """
        taken, delivered = False, 0
        try:
            # Cached blocks of a prompt are not computed again and so have no logits. A random salt
            # finds no cached blocks.
            number = request.cache_salt if request.prompt_log_probs < 0 else secrets.randbits(63) + 1
            salt = {"cache_salt": str(number)} if number and self._has_salts else {}
            ids = request.input_ids.reshape(-1)
            if self._translator is not None:
                self._translator.expect_request(ids, number if salt else 0, request.adapter)
            state.result = self._llm.generate_async(
                ids.tolist(), params, lora_request=self._adapters.get(request.adapter), streaming=True, **salt
            )
            taken = True
            async for output in state.result:
                completion = output.outputs[0]
                reason = completion.finish_reason
                if reason is not None and reason not in _REASONS:
                    raise RuntimeError(f"TensorRT-LLM ended the answer early, as {reason}")
                tokens = list(completion.token_ids[delivered:])
                entries = completion.logprobs[delivered:] if completion.logprobs else []
                tops = [_most_likely(entry, state.alternatives) for entry in entries] if state.alternatives else []
                self._outputs.put(
                    StepOutput(
                        key=key,
                        token_ids=tokens,
                        # 1.2 returns the most likely tokens, which need not include the sampled
                        # token
                        log_probs=[_log_prob(entry, token) for entry, token in zip(entries, tokens, strict=False)],
                        finish=RUNNING if reason is None else _REASONS[reason],
                        cached=None if delivered else getattr(output, "cached_tokens", None),
                        tops=tops,
                        prompt=[]
                        if delivered or request.prompt_log_probs < 0
                        else _prompt_places(completion.prompt_logprobs, ids.size, request.prompt_log_probs),
                    )
                )
                delivered += len(tokens)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the library raises belongs to this request
            is_dead = _is_dead(error) or self._has_shut_down()
            if is_dead:
                self._death_reason = str(error) or "its worker process has ended"
            # an error in a step ends all requests (1.2.1 _torch/pyexecutor/py_executor.py,
            # _handle_errors)
            refused = not taken and not is_dead and _is_refusal(error)
            cause = contract.INPUT_IDS if refused else ENGINE_FAILED
            self._outputs.put(StepOutput(key, [], [], FAILED, f"{cause}: {error}"))

    def _has_shut_down(self) -> bool:
        """Return True if the library's executor has ended, and no running request gets an answer.

        The executor shuts itself down before it raises the error that ended a worker
        (executor/executor.py, _handle_background_error).
        """
        executor = getattr(self._llm, "_executor", None)
        return executor is not None and bool(executor.is_shutdown())

    def cancel(self, key: int) -> None:
        state = self._sequences.pop(key, None)
        if state is not None:
            self._loop.call_soon_threadsafe(_abort, state)

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> Iterable[StepOutput]:
        outputs = self._take_outputs()
        if self._death_reason:
            raise DeadEngineError(f"TensorRT-LLM: {self._death_reason}")
        self._iteration += bool(outputs)
        return [kept for kept in map(self._apply_stop_words, outputs) if kept is not None]

    def _take_outputs(self) -> list[StepOutput]:
        """Wait up to `step_wait` for an output, and return all outputs that have arrived."""
        try:
            outputs = [self._outputs.get(timeout=self.step_wait)]
        except queue.Empty:
            return []
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        return outputs

    def _apply_stop_words(self, output: StepOutput) -> StepOutput | None:
        state = self._sequences.get(output.key)
        if state is None:
            return None
        state.started = True
        kept = state.matcher.find(output.token_ids) if state.matcher is not None else None
        if kept is not None:
            self.cancel(output.key)
            return output._replace(
                token_ids=output.token_ids[:kept],
                log_probs=output.log_probs[:kept],
                finish=STOP,
                tops=output.tops[:kept],
            )
        if output.finish != RUNNING:
            self._sequences.pop(output.key, None)
        return output

    def stats(self) -> EngineStats:
        cache, batch = (self._latest.get(name) or {} for name in ("kvCacheStats", "inflightBatchingStats"))
        blocks, used = self._gpu_blocks.count(int(cache.get("maxNumBlocks", 0)), int(cache.get("usedNumBlocks", 0)))
        prefill = [state.prompt_tokens for state in self._sequences.values() if not state.started]
        active = len(self._sequences)
        scheduled = min(active, self._options.max_batch_size)
        return EngineStats(
            active=active,
            scheduled=scheduled,
            waiting=active - scheduled,
            context=len(prefill),
            context_tokens=sum(prefill),
            iteration=self._iteration,
            kv_blocks_max=blocks * self._caches,
            kv_blocks_used=used * self._caches,
            tokens_per_block=int(cache.get("tokensPerBlock", 0)),
            max_requests=self._options.max_batch_size,
            kv_blocks_reused=cache.get("reusedBlocks"),
            paused=int(batch.get("numPausedRequests", 0)),
            memory=tuple((kind, self._latest[name]) for kind, name in _MEMORY.items() if name in self._latest),
        )

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        events = []
        while not self._kv_events.empty():
            events.append(self._kv_events.get_nowait())
        return events

    async def _read_periodically(
        self, what: str, method: str, keep: Callable[[Iterable[Any]], None], period: float
    ) -> None:
        """Call a method of the library every `period` seconds until the runtime closes.

        The library's asynchronous calls cannot be used (1.2.1 and 1.3). `aget_stats` asks the
        worker once and iterates over an empty queue from then on (executor/proxy.py). An empty read
        of events with a timeout of 0 raises asyncio.QueueEmpty out of the iteration, and an
        iteration that timed out stays exhausted (executor/result.py, IterationResult.__anext__).
        The synchronous calls block for a round trip, so they run in a thread.

        Args:
            what: The name of the values in the log, "statistics" or "KV-cache events".
            method: The name of the method.
            keep: Receives the values of each call.
            period: The seconds between two calls.
        """
        while True:
            try:
                keep(await asyncio.to_thread(getattr(self._llm, method), NO_WAIT))
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - both calls are beta there; serving goes on without them
                self._forget_readings(what)
                if what not in self._logged_failures:
                    self._logged_failures.add(what)
                    reason = f"({type(error).__name__}: {error})"
                    text = f"TensorRT-LLM's {what} cannot be read {reason}; the engine continues and tries again."
                    print(text, file=sys.stderr, flush=True)
                await asyncio.sleep(_RETRY_PERIOD)
            await asyncio.sleep(period)

    def _keep_events(self, events: Iterable[Any]) -> None:
        assert self._translator is not None
        for change in self._translator.translate([_parsed(event) for event in events]):
            self._kv_events.put(change)

    def _keep_stats(self, stats: Iterable[Any]) -> None:
        for entry in stats:
            self._latest = _parsed(entry)

    def _forget_readings(self, what: str) -> None:
        """Drop statistics and events after a failed read, because old values would mislead."""
        if what == "statistics":
            self._latest = {}
        else:
            self._kv_events.put(KvCacheEvent(contract.KV_CLEARED))

    def close(self) -> None:
        for key in list(self._sequences):
            self.cancel(key)
        for reader in self._readers:
            reader.cancel()
        self._llm.shutdown()
        # keep the loop running until the readers have handled their cancellation
        self._loop.call_soon_threadsafe(self._loop.call_later, _CLOSE_TIMEOUT, self._loop.stop)
        self._thread.join(timeout=10)


def _parsed(entry: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(entry) if isinstance(entry, str) else entry
    return found


def _unsupported_words(request: RuntimeRequest) -> list[list[int]]:
    """Return the stop words that StopWordMatcher must find instead of the library.

    The library takes no stop words of several tokens. Until `min_tokens`, the library withholds
    only `end_id`, because its minimum-length penalty masks a single token.
    """
    return [word for word in request.stop_words if len(word) > 1 or request.min_tokens]


def _reported_block_size(arguments: dict[str, Any]) -> int:
    """Return the tokens per KV-cache block if the library reports events of one cache, else 0.

    With attention DP each rank has a separate cache, and the library mixes the events of all caches
    (1.2.1 batch_manager/kvCacheEventManager.cpp, exchangeAttentionDpThread).
    """
    if arguments.get("enable_attention_dp"):
        return 0
    return int(_cache_field(arguments, "tokens_per_block", 32)) if _cache_field(arguments, EVENTS, 0) else 0


def _cache_field(arguments: dict[str, Any], name: str, default: int) -> Any:
    config = arguments.get("kv_cache_config")
    return config.get(name, default) if isinstance(config, dict) else getattr(config, name, default)


def _abort(state: _Sequence) -> None:
    if state.result is not None:
        state.result.abort()
    if state.future is not None:
        state.future.cancel()


def _is_refusal(error: Exception) -> bool:
    """Return True if the error says that the request itself is invalid.

    `generate_async` raises RequestError, a RuntimeError, for a prompt that is too long (1.2.1
    llmapi/llm.py, _check_arguments).
    """
    return isinstance(error, ValueError) or any(kind.__name__ == "RequestError" for kind in type(error).__mro__)


def _is_dead(error: Exception) -> bool:
    """Return True if the error ends the engine.

    TensorRT-LLM 1.3 has an error class for this case. 1.2 raises an error with a certain message,
    and goes on after a fatal CUDA error, with which it then answers each request (1.2.1
    _torch/pyexecutor/py_executor.py, _forward_step).
    """
    named = any(kind.__name__ == "EngineDeadError" for kind in type(error).__mro__)
    message = str(error)
    # other errors may contain a client's text
    return named or message == "LLM is shutting down" or (message.startswith(_CUDA) and is_fatal_cuda_error(message))


def _most_likely(entry: Any, count: int) -> Alternatives:
    """Return the `count` most likely tokens of an entry {id: Logprob}.

    The entry may contain the sampled token in addition to the most likely tokens.
    """
    pairs = ((token, float(log_prob.logprob)) for token, log_prob in entry.items())
    return sorted(pairs, key=lambda pair: -pair[1])[:count]


def _prompt_places(entries: Any, length: int, count: int) -> list[Alternatives]:
    """Return the most likely tokens in place of each prompt token after the first.

    The library's entry with index i predicts the token after prompt token i, so the last entry
    predicts the answer's first token. An entry of 1.2 has the `count` most likely tokens; an entry
    of 1.3 has the prompt's real token in addition.
    """
    if entries is None or len(entries) < length:
        raise RuntimeError(f"TensorRT-LLM returned {len(entries or ())} log-probabilities for {length} prompt tokens")
    return [_most_likely(entry, count + 1) for entry in entries[: length - 1]]


def _log_prob(entry: Any, token: int) -> float:
    found = entry.get(token)
    return _NOT_COMPUTED if found is None else float(found.logprob)


def sampling_params(
    api: Any, request: RuntimeRequest, sequence: int, log_probs: int, model_ends: tuple[int, ...] = ()
) -> Any:
    """Return the library's `SamplingParams` of one sequence.

    Args:
        api: The parts of the library.
        request: The request that the sequence belongs to.
        sequence: The index of the sequence in the request.
        log_probs: The value of the library's parameter `logprobs` that makes it return the
            log-probabilities of the sampled tokens.
        model_ends: The model's end-of-text token ids.

    Raises:
        RequestRejectedError: The request needs a feature that the library does not have.
    """
    # pass only stop words of one token; with `min_tokens`, StopWordMatcher finds these words
    # instead
    stop_tokens = [word[0] for word in request.stop_words if len(word) == 1 and not request.min_tokens]
    # A request without end tokens gets the model's end token, which is then ignored. The library
    # would use an id of -1 in its computations.
    ends = ordered_end_ids(request, model_ends) or list(model_ends[:1])
    fields: dict[str, Any] = {
        **sampling_fields(request, sequence),
        "max_tokens": request.max_new_tokens,
        "min_tokens": request.min_tokens or None,
        "end_id": ends[0] if ends else -1,
        "pad_id": ends[0] if ends else 0,
        "stop_token_ids": [*(ends[1:] if request.end_ids else ()), *stop_tokens] or None,
        "ignore_eos": not request.end_ids,
        # otherwise the library drops the token that ended the sequence, and usage would not count
        # it
        "include_stop_str_in_output": True,
        "detokenize": False,
        "add_special_tokens": False,
        # if several tokens are requested, 1.3 adds the sampled token, and 1.2 does not
        "logprobs": max(log_probs, request.top_log_probs) if request.log_probs or request.top_log_probs else None,
    }
    if request.prompt_log_probs >= 0:
        # 0 returns nothing on 1.2, and the prompt token's log-probability on 1.3
        fields["prompt_logprobs"] = max(log_probs, request.prompt_log_probs)
    if request.embedding_bias is not None:
        fields["embedding_bias"] = as_tensor(request.embedding_bias)
    if request.guide is not None:
        fields["guided_decoding"] = _guide(api, *request.guide)
    return api.SamplingParams(**fields)


def _guide(api: Any, kind: str, guide: str) -> Any:
    if kind == "json":
        return api.GuidedDecodingParams(json_object=True)
    if kind == "json_schema":
        return api.GuidedDecodingParams(json=check_json(guide))
    return api.GuidedDecodingParams(**{"regex": guide} if kind == "regex" else {"grammar": guide})
