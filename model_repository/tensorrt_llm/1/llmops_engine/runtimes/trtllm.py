"""TensorRT-LLM's LLM API (`tensorrt_llm.LLM`) as an engine runtime, for checkpoints.

The library schedules by itself and answers through asyncio; results come from its event loop into a
queue, and `step` takes what is there. docs/tensorrt-llm-calls.md lists each call into the library,
with its defaults, exceptions and threads.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import queue
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import llmops_contract as contract

from ..engine_runtime import (
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
from ..request import RequestRejectedError, RuntimeRequest
from .remote import PYTHON_VARIABLE, RemoteRuntime
from .stop_words import StopWordMatcher
from .torch_tensors import as_tensor
from .trtllm_library import EVENTS, Library, check_announced, choose_profile, final_arguments, load_library
from .visible_gpus import restrict_visible_gpus

if TYPE_CHECKING:
    from ..kv_events import KvEventTranslator

_REASONS = {"stop": STOP, "length": LENGTH}
#: Seconds between two reads of the library's statistics. It keeps one entry per step until they are
#: read, and gauges need no more.
_STATS_PERIOD = 1.0
#: Seconds between two reads of the library's KV-cache events: gateways route by them.
_EVENTS_PERIOD = 0.1
#: Seconds that the readers get to end.
_CLOSING = 0.05
#: The timeout of both reads: take what is there, and wait for nothing.
_AT_ONCE = 0
# what OpenAI's API gives for a token whose log-probability was not computed
_NOT_COMPUTED = -9999.0
#: The reason why an engine that always takes the most likely token refuses a temperature.
GREEDY_ONLY = (
    "this engine's speculation always takes the most likely token; send temperature 0, or build it without "
    "speculative_config.allow_advanced_sampling=false"
)
_MEMORY = {"cpu": "cpuMemUsage", "gpu": "gpuMemUsage", "pinned": "pinnedMemUsage"}


@dataclass(frozen=True)
class TrtllmOptions:
    """`profiles`: the LLM-API arguments for each release line; `end_ids` are the model's own;
    `capabilities` what the repository announces; `adapters` have id, name and path.
    """

    model: str
    tokenizer: str
    profiles: list[dict[str, Any]]
    max_batch_size: int
    end_ids: tuple[int, ...] = ()
    capabilities: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[dict[str, Any], ...] = ()


def create(parameters: dict[str, str], card: dict[str, Any]) -> EngineRuntime:
    """In this process, or under the Python that has the library."""
    restrict_visible_gpus(parameters.get("gpu_device_ids", ""))
    options = TrtllmOptions(
        model=parameters["gpt_model_path"],
        tokenizer=card["tokenizer_dir"],
        profiles=json.loads(parameters["llm_profiles"]),
        max_batch_size=card["max_batch_size"],
        end_ids=tuple(card["end_ids"]),
        capabilities=card["capabilities"],
        adapters=tuple(json.loads(parameters.get("lora_adapters", "[]"))),
    )
    python = os.environ.get(PYTHON_VARIABLE)
    return RemoteRuntime(python, options, "trtllm") if python else TrtllmRuntime(options)


def start(fields: dict[str, Any]) -> TrtllmRuntime:
    """Load the model in this process; `fields` are those of TrtllmOptions."""
    return TrtllmRuntime(TrtllmOptions(**fields))


class _Sequence:
    __slots__ = ("future", "matcher", "prompt_tokens", "result", "started", "tops")

    def __init__(self, request: RuntimeRequest) -> None:
        self.future: Future[None] | None = None
        self.result: Any = None
        self.prompt_tokens = int(request.input_ids.size)
        self.started = False
        self.tops = request.top_log_probs
        words = _watched_words(request)
        self.matcher = StopWordMatcher(words, request.min_tokens) if words else None


class TrtllmRuntime(EngineRuntime):
    """Token ids in, token ids out: nothing is tokenised or detokenised by the library.

    `step_wait`: how long a step waits for the first token (s).
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
            one["id"]: self._api.LoRARequest(one["name"], one["id"], one["path"]) for one in options.adapters
        }
        self._sequences: dict[int, _Sequence] = {}
        self._outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self._dead = ""
        self._iteration = 0
        self._latest: dict[str, Any] = {}
        self._readers: list[Future[None]] = []
        self._names: KvEventTranslator | None = None
        self._changes: queue.SimpleQueue[KvCacheEvent] = queue.SimpleQueue()
        self._salts = "cache_salt" in inspect.signature(self._api.LLM.generate_async).parameters
        self._tokens_per_block = _reused_blocks(arguments)
        self._with_stats = bool(arguments.get("enable_iter_perf_stats"))
        self._failed: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trtllm", daemon=True)
        self._thread.start()

    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        if self._profile["greedy_only"] and not request.sampling.greedy:
            raise RequestRejectedError(f"{contract.TEMPERATURE}: {GREEDY_ONLY}")
        params = sampling_params(self._api, request, sequence, self._profile["log_probs"], self._options.end_ids)
        state = _Sequence(request)
        self._sequences[key] = state
        ids = request.input_ids.reshape(-1).tolist()
        self._start_readers()
        generate = self._generate(key, state, request, ids, params, self._adapters.get(request.adapter))
        state.future = asyncio.run_coroutine_threadsafe(generate, self._loop)

    def _start_readers(self) -> None:
        """Read statistics and events from the first request on: before it the library has none."""
        if self._readers:
            return
        self._names = _kv_names(self._tokens_per_block) if self._tokens_per_block else None
        reads = [self._read_stats()] if self._with_stats else []
        if self._names is not None:
            reads.append(self._read_events(self._names))
        self._readers = [asyncio.run_coroutine_threadsafe(read, self._loop) for read in reads]

    async def _generate(
        self, key: int, state: _Sequence, request: RuntimeRequest, ids: list[int], params: Any, adapter: Any
    ) -> None:
        """Runs on the library's loop, to which `generate_async` binds its result."""
        try:
            more = {"cache_salt": str(request.cache_salt)} if request.cache_salt and self._salts else {}
            if self._names is not None:
                self._names.asked(request.input_ids.reshape(-1), request.cache_salt if more else 0, request.adapter)
            state.result = self._llm.generate_async(ids, params, lora_request=adapter, streaming=True, **more)
            seen = 0
            async for output in state.result:
                completion = output.outputs[0]
                tokens = list(completion.token_ids[seen:])
                entries = completion.logprobs[seen:] if completion.logprobs else []
                log_probs = _chosen(entries, tokens)
                tops = [_most_likely(entry, state.tops) for entry in entries] if state.tops else []
                cached = None if seen else getattr(output, "cached_tokens", None)
                seen += len(tokens)
                finish = _finish(completion.finish_reason)
                self._outputs.put(StepOutput(key, tokens, log_probs, finish, cached=cached, tops=tops))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the library raises belongs to this request
            if _is_dead(error):
                self._dead = str(error) or "its worker is gone"
            self._outputs.put(StepOutput(key, [], [], FAILED, f"{contract.INPUT_IDS}: {error}"))

    def cancel(self, key: int) -> None:
        state = self._sequences.pop(key, None)
        if state is not None:
            self._loop.call_soon_threadsafe(_abort, state)

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> Iterable[StepOutput]:
        outputs = self._waiting_outputs()
        if self._dead:
            raise DeadEngineError(f"TensorRT-LLM: {self._dead}")
        self._iteration += bool(outputs)
        return [read for read in map(self._read, outputs) if read is not None]

    def _waiting_outputs(self) -> list[StepOutput]:
        """At least one if any comes within `step_wait`, and all that are there by then."""
        try:
            outputs = [self._outputs.get(timeout=self.step_wait)]
        except queue.Empty:
            return []
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        return outputs

    def _read(self, output: StepOutput) -> StepOutput | None:
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
        context = [state.prompt_tokens for state in self._sequences.values() if not state.started]
        active = len(self._sequences)
        scheduled = min(active, self._options.max_batch_size)
        return EngineStats(
            active=active,
            scheduled=scheduled,
            waiting=active - scheduled,
            context=len(context),
            context_tokens=sum(context),
            iteration=self._iteration,
            kv_blocks_max=int(cache.get("maxNumBlocks", 0)),
            kv_blocks_used=int(cache.get("usedNumBlocks", 0)),
            tokens_per_block=int(cache.get("tokensPerBlock", 0)),
            max_requests=self._options.max_batch_size,
            kv_blocks_reused=cache.get("reusedBlocks"),
            paused=int(batch.get("numPausedRequests", 0)),
            memory=tuple((kind, self._latest[name]) for kind, name in _MEMORY.items() if name in self._latest),
        )

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        changes = []
        while not self._changes.empty():
            changes.append(self._changes.get_nowait())
        return changes

    async def _read_events(self, names: KvEventTranslator) -> None:
        """Read KV-cache events for as long as the runtime lives; the library drops the oldest of a
        full buffer.

        Its asynchronous call cannot be used: an empty read with a timeout of 0 raises
        asyncio.QueueEmpty out of the iteration, and one that timed out stays exhausted (1.2.1
        executor/result.py, IterationResult.__anext__).
        """
        while True:
            try:
                events = await asyncio.to_thread(self._llm.get_kv_cache_events, _AT_ONCE)
                for change in names.read([_parsed(event) for event in events]):
                    self._changes.put(change)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - events are beta there; serving goes on without them
                self._tell_once("KV-cache events", error)
                # what was lost is unknown, and names that are gone would mislead
                self._changes.put(KvCacheEvent(contract.KV_CLEARED))
                await asyncio.sleep(_STATS_PERIOD)
            await asyncio.sleep(_EVENTS_PERIOD)

    async def _read_stats(self) -> None:
        """Read statistics for as long as the runtime lives: the library keeps those of every step
        until then.

        Its asynchronous call asks the worker once, and iterates over an empty queue from then on
        (1.2.1 and 1.3 executor/proxy.py, aget_stats); the synchronous one blocks for a round trip,
        so it has a thread.
        """
        while True:
            try:
                for stats in await asyncio.to_thread(self._llm.get_stats, _AT_ONCE):
                    self._latest = _parsed(stats)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - statistics are beta there; serving goes on without them
                # stale figures would mislead
                self._latest = {}
                self._tell_once("statistics", error)
            await asyncio.sleep(_STATS_PERIOD)

    def _tell_once(self, what: str, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            text = f"TensorRT-LLM's {what} cannot be read ({type(error).__name__}: {error}); they are asked for again."
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        for key in list(self._sequences):
            self.cancel(key)
        for reader in self._readers:
            reader.cancel()
        self._llm.shutdown()
        # after the readers have heard that they are cancelled
        self._loop.call_soon_threadsafe(self._loop.call_later, _CLOSING, self._loop.stop)
        self._thread.join(timeout=10)


def _parsed(entry: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(entry) if isinstance(entry, str) else entry
    return found


def _watched_words(request: RuntimeRequest) -> list[list[int]]:
    """The stop words that the library is not given: it has none of several tokens, and withholds
    `end_id` alone until `min_tokens` (its minimum-length penalty masks that one token).
    """
    return [word for word in request.stop_words if len(word) > 1 or request.min_tokens]


def _kv_names(tokens_per_block: int) -> KvEventTranslator | None:
    """None where the library's Python lacks the hash that names blocks: its cache is not reported
    then.
    """
    try:
        from ..kv_events import KvEventTranslator
    except ModuleNotFoundError:
        return None
    return KvEventTranslator(tokens_per_block)


def _reused_blocks(arguments: dict[str, Any]) -> int:
    """Tokens per block where events are reported, else 0."""
    config = arguments.get("kv_cache_config")
    get = config.get if isinstance(config, dict) else lambda name, default=None: getattr(config, name, default)
    return int(get("tokens_per_block", 32)) if config is not None and get(EVENTS, 0) else 0


def _abort(state: _Sequence) -> None:
    if state.result is not None:
        state.result.abort()
    if state.future is not None:
        state.future.cancel()


def _finish(reason: str | None) -> str:
    return RUNNING if reason is None else _REASONS.get(reason, STOP)


def _is_dead(error: Exception) -> bool:
    """1.3 raises an exception of this name, wherever it is defined; 1.2 only says these words."""
    named = any(kind.__name__ == "EngineDeadError" for kind in type(error).__mro__)
    return named or str(error) == "LLM is shutting down"


def _chosen(entries: list[Any], tokens: list[int]) -> list[float]:
    """The log-probability of each token taken, from {id: Logprob}.

    1.2 computes the most likely tokens, and a sampled one need not be among them.
    """
    return [_log_prob(entry, token) for entry, token in zip(entries, tokens, strict=False)]


def _most_likely(entry: Any, count: int) -> Alternatives:
    """The sampled token may be one more, below the most likely ones."""
    found = sorted(((token, float(one.logprob)) for token, one in entry.items()), key=lambda pair: -pair[1])
    return found[:count]


def _log_prob(entry: Any, token: int) -> float:
    found = entry.get(token)
    return _NOT_COMPUTED if found is None else float(found.logprob)


def sampling_params(
    api: Any, request: RuntimeRequest, sequence: int, log_probs: int, model_ends: tuple[int, ...] = ()
) -> Any:
    """`SamplingParams` of one sequence; `model_ends` are what ends the model's own texts. Raises
    Refused for what the library cannot do.
    """
    sampling = request.sampling
    single = [word[0] for word in request.stop_words if len(word) == 1 and not request.min_tokens]
    # the tokenizer's own end of text comes first on the card, and is the one that min_tokens
    # withholds
    known = [one for one in model_ends if one in request.end_ids]
    ends = [*known, *sorted(request.end_ids.difference(known))] or list(model_ends[:1])
    # without an end of its own a sequence is given the model's, ignored: the library would compute
    # with -1
    fields: dict[str, Any] = {
        "max_tokens": request.max_new_tokens,
        "min_tokens": request.min_tokens or None,
        "end_id": ends[0] if ends else -1,
        "pad_id": ends[0] if ends else 0,
        "stop_token_ids": [*(ends[1:] if request.end_ids else ()), *single] or None,
        "ignore_eos": not request.end_ids,
        # otherwise the token that ended the sequence is cut off, and not counted
        "include_stop_str_in_output": True,
        "detokenize": False,
        "add_special_tokens": False,
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        # with alternatives, 1.3 adds the sampled token, and 1.2 does not
        "logprobs": max(log_probs, request.top_log_probs) if request.log_probs or request.top_log_probs else None,
    }
    if request.embedding_bias is not None:
        fields["embedding_bias"] = as_tensor(request.embedding_bias)
    if sampling.greedy:
        fields["top_k"] = 1
    else:
        fields |= {
            "temperature": sampling.temperature,
            # never None: the C++ sampler's defaults are 0 for both, which is the most likely token
            # (1.2.1 layers/defaultDecodingParams.h; kernels/samplingTopKKernels.h,
            # regularizeTopKTopP)
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p or None,
            "seed": None if sampling.seed is None else (sampling.seed + sequence) % 2**63,
        }
    if request.guide is not None:
        fields["guided_decoding"] = _guide(api, *request.guide)
    return api.SamplingParams(**fields)


def _guide(api: Any, kind: str, guide: str) -> Any:
    if kind == "json":
        return api.GuidedDecodingParams(json_object=True)
    if kind == "json_schema":
        try:
            json.loads(guide)
        except ValueError as error:
            raise RequestRejectedError(f"{contract.GUIDE}: is not JSON ({error})") from None
        return api.GuidedDecodingParams(json=guide)
    return api.GuidedDecodingParams(**{"regex": guide} if kind == "regex" else {"grammar": guide})
