"""The engine runtime for CPUs, which drives OpenVINO GenAI's continuous batching step by step."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llmops_contract as contract
import numpy as np
import openvino as ov
import openvino_genai as genai

from ..engine_runtime import (
    FAILED,
    LENGTH,
    RUNNING,
    STOP,
    EngineRuntime,
    EngineStats,
    KvCacheEvent,
    Preparation,
    StepOutput,
)
from ..guided.grammar_service import GrammarService
from ..guided.openvino import GrammarPipeline, clean_error, structured_output
from ..guided.sandbox import GrammarLimits, GrammarSandbox, sandbox_command
from ..guided.watchdog import GrammarWatchdog, sampler_threads, thread_times
from ..recent_blocks import RecentBlocks
from ..request import RequestRejectedError, RuntimeRequest, RuntimeSamplingParams
from .chunk_size import MeasuredStep, largest_chunk, mean_seconds, smallest_chunk
from .stop_words import StopWordMatcher

#: Tokens per KV-cache block, which OpenVINO's CPU plugin fixes.
TOKENS_PER_BLOCK = 32
_RUNNING = genai.GenerationStatus.RUNNING
_IGNORED = genai.GenerationStatus.IGNORED
#: Maximum number of steps that a failed pipeline gets to release its cancelled requests. A pipeline
#: that needs more steps cannot be used again.
_RECOVERY_STEPS = 3
_SHARED_CACHE_WARNING = (
    "openvino.prefix_cache is true: tenants share the prefix cache, so the time of a first token tells "
    "whether another tenant has sent the same prompt. To keep tenants apart, remove prefix_cache from engine.json."
)
#: Minimum number of tokens of the second warm-up prompt. Enough that all threads that compute the
#: model take part.
_WARM_UP = 128
#: Maximum seconds of the mean step while the longest prompt is read: about the time in which a
#: person reads a token. A larger value allows larger chunks, which read a long prompt faster and
#: delay other answers longer.
STEP_SECONDS = 0.1
#: Number of tokens of the prompt that is read to measure steps of the largest chunk size.
_MEASURED_PROMPT = 1024
#: Properties for OpenVINO's CPU plugin. Threads are not pinned to cores, because two engines that
#: pin their threads to the same cores wait for each other: one engine's answers took twice as long
#: as the other's. An engine alone is about 5 % faster with pinning.
_CPU_PROPERTIES = {"ENABLE_CPU_PINNING": False}
#: Size in tokens of the small chunk whose steps are measured in addition to the largest chunk's.
_MEASURED_CHUNK = 32
#: Maximum seconds spent on measurements. A large model is measured with fewer steps, so that its
#: start is not delayed.
_MEASURING_SECONDS = 3.0
#: Multiple of the grammars' budget from which on a step counts as very slow. The time of a grammar
#: can grow fourfold with each token.
_VERY_SLOW_BUDGETS = 4
_libc = ctypes.CDLL(None)
_REASONS = {genai.GenerationFinishReason.LENGTH: LENGTH, genai.GenerationFinishReason.STOP: STOP}


@dataclass(frozen=True)
class OpenVINOOptions:
    """The options of one engine.

    `properties` are passed to OpenVINO (KV_CACHE_PRECISION, …). `kv_cache` has the model's
    `layers`, `kv_heads` and `head_dim`. A `prefix_cache` of None means a prefix cache that is
    switched off at the first request with a tenant's salt. Chunks of `max_num_tokens` are halved
    until the mean step takes at most `step_seconds` while the longest prompt is read; a
    `step_seconds` of None keeps them.
    """

    model_path: Path
    max_batch_size: int
    max_seq_len: int
    vocab_size: int
    max_num_tokens: int
    cache_tokens: int | None
    device: str
    properties: dict[str, Any]
    kv_cache: dict[str, int]
    grammars: GrammarLimits = field(default_factory=GrammarLimits)
    prefix_cache: bool | None = None
    step_seconds: float | None = None


def create(parameters: dict[str, str], metadata: dict[str, Any]) -> EngineRuntime:
    """Start the engine in this process."""
    settings = json.loads(parameters["openvino"])
    cache = parameters.get("max_tokens_in_paged_kv_cache")
    return OpenVINORuntime(
        OpenVINOOptions(
            model_path=Path(parameters["gpt_model_path"]),
            max_batch_size=metadata["max_batch_size"],
            max_seq_len=metadata["max_seq_len"],
            vocab_size=metadata["vocab_size"],
            max_num_tokens=int(parameters["max_num_tokens"]),
            cache_tokens=int(cache) if cache else None,
            device=settings.get("device", "CPU"),
            properties=settings.get("properties", {}),
            kv_cache=settings["kv_cache"],
            grammars=GrammarLimits(**settings.get("grammars", {})),
            prefix_cache=settings.get("prefix_cache"),
            step_seconds=settings.get("step_seconds", STEP_SECONDS),
        )
    )


class _Sequence:
    """A sequence in the pipeline.

    `unread` is an estimate of the number of prompt tokens that no step has read yet.
    """

    __slots__ = ("generated", "handle", "matcher", "request", "started", "unread")

    def __init__(self, handle: Any, request: RuntimeRequest) -> None:
        self.handle = handle
        self.request = request
        self.generated: list[int] = []
        self.unread = int(request.input_ids.size)
        self.started = False
        words = [word for word in request.stop_words if len(word) > 1]
        self.matcher = StopWordMatcher(words) if words else None


class OpenVINORuntime(EngineRuntime):
    """A runtime that takes and returns token ids, without the pipeline's own tokenizer."""

    def __init__(self, options: OpenVINOOptions) -> None:
        self._options = options
        self._blocks = _kv_blocks(options)
        self._sequences: dict[int, _Sequence] = {}
        self._iteration = 0
        self._old_pipeline: Any = None
        self._recent_blocks = RecentBlocks(self._blocks, TOKENS_PER_BLOCK)
        self._has_prefix_cache = options.prefix_cache is not False
        if options.prefix_cache:
            print(_SHARED_CACHE_WARNING, file=sys.stderr, flush=True)
        self._watchdog = GrammarWatchdog(options.grammars.token_seconds)
        # The grammar that was ended in a slow step with several grammars, the reason for its
        # rejection, and the other grammars of the step. The grammar is rejected once a step of the
        # other grammars stays within the budget.
        self._accused: tuple[tuple[str, str], str, set[tuple[str, str]]] | None = None
        # start with the smallest chunk, which most models on most CPUs keep, because every other
        # size compiles the model again
        self._chunk = _smallest_chunk(options)
        self._load()
        if self._chunk < options.max_num_tokens and _keeps_objective(self._pipeline, self._chunk, options):
            self._set_chunk(options.max_num_tokens)
            self._set_chunk(_calibrated_chunk(self._pipeline, options))

    def _set_chunk(self, chunk: int) -> None:
        if chunk != self._chunk:
            self._chunk = chunk
            self._replace_pipeline()

    def _load(self) -> None:
        options = self._options
        known = thread_times()
        scheduler = _scheduler(options, self._blocks, self._chunk, self._has_prefix_cache)
        properties = (_CPU_PROPERTIES if options.device == "CPU" else {}) | options.properties
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(options.model_path), scheduler, options.device, properties
        )
        self._warm_up(known)
        tokenizer = self._pipeline.get_tokenizer()
        self._grammars = GrammarService(
            lambda niceness: GrammarSandbox(*sandbox_command(options.model_path, options.vocab_size, niceness)),
            lambda: GrammarPipeline(tokenizer, options.vocab_size),
            lambda: self.wake(),
            options.grammars,
        )

    def _warm_up(self, known: Iterable[int]) -> None:
        """Run the first step, which is long, and find the sampler's threads.

        `known` are the native ids of the threads that existed before the pipeline. The step also
        creates the tokenizer's grammar compiler, which is not safe to do in two threads at once.
        """
        config = genai.GenerationConfig()
        config.max_new_tokens = 1
        self._pipeline.generate([ov.Tensor(np.zeros((1, 1), np.int64))], [config])
        before, started = thread_times(), time.thread_time()
        # The first step of a chunk size is long. So the warm-up reads a chunk of the size whose
        # steps are measured afterwards.
        tokens = max(_WARM_UP, self._chunk) if self._options.step_seconds is not None else _WARM_UP
        self._pipeline.generate([ov.Tensor(np.ones((1, tokens), np.int64))], [config])
        self._watchdog.watch_threads(sampler_threads(known, before, thread_times(), time.thread_time() - started))

    def prepare(self, request: RuntimeRequest) -> Preparation | None:
        if request.cache_salt and self._has_prefix_cache and self._options.prefix_cache is None:
            self._drop_prefix_cache()
        if request.guide is None:
            return None
        structured_output(request.guide)
        if self._grammars.memory > self._options.grammars.total and not self._grammars.knows(request.guide):
            self._replace_pipeline()
        return self._grammars.prepare(request.guide, request.caller)

    def _drop_prefix_cache(self) -> None:
        """Continue without a prefix cache, because GenAI's cache cannot separate tenants.

        The time of a first token would tell what other tenants have sent. A gateway sends salts if
        each tenant has a cache of its own. Running sequences end on the old pipeline.
        """
        self._has_prefix_cache = False
        try:
            self._replace_pipeline()
        except RequestRejectedError:
            self._has_prefix_cache = True
            raise

    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        config = generation_config(request, sequence)
        try:
            handle = self._pipeline.add_request(key, ov.Tensor(request.input_ids[np.newaxis]), config)
        except RuntimeError as error:
            raise RequestRejectedError(f"{contract.INPUT_IDS}: {clean_error(str(error))}") from None
        self._sequences[key] = _Sequence(handle, request)

    def cancel(self, key: int) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            sequence.handle.cancel()

    def has_work(self) -> bool:
        return bool(self._sequences) or any(map(_unfinished, self._pipelines()))

    def step(self) -> Iterator[StepOutput]:
        # step() holds the GIL: the other Python threads of this process run only between two steps
        running = (sequence.request.guide for sequence in self._sequences.values())
        guides = [*dict.fromkeys(guide for guide in running if guide is not None)]
        self._watchdog.start()
        for pipeline in self._pipelines():
            pipeline.step()
        excess = self._watchdog.stop(len(self._sequences), self._expected_seconds() if guides else None)
        self._iteration += 1
        self._update_unread()
        for key, sequence in list(self._sequences.items()):
            output = self._read(key, sequence)
            if output is not None:
                self._record_cached(sequence, output)
                if output.finish:
                    self._sequences.pop(key, None)
                    if output.finish != FAILED and sequence.request.guide is not None:
                        self._grammars.record_finished(sequence.request.guide)
                yield output
        yield from self._end_slow_grammar(excess, guides)

    def _update_unread(self) -> None:
        """Estimate which prompt tokens the last step read.

        GenAI fills a step with running answers first, then with prompts.

        A prompt with a cached prefix needs fewer tokens than estimated. The estimate therefore
        stays at one token until the first new token arrives.
        """
        room = self._chunk - sum(sequence.started for sequence in self._sequences.values())
        for sequence in self._sequences.values():
            if not sequence.started:
                read = min(max(room, 0), sequence.unread - 1)
                sequence.unread -= read
                room -= read

    def _expected_seconds(self) -> float:
        """Return the mean seconds per step of the grammars of all running sequences."""
        guides = (sequence.request.guide for sequence in self._sequences.values())
        return sum(self._grammars.mean_seconds(guide) for guide in guides if guide is not None)

    def _end_slow_grammar(self, seconds: float, guides: Sequence[tuple[str, str]]) -> Iterator[StepOutput]:
        """End the sequences of the most suspect grammar after a slow step.

        `seconds` is the result of `GrammarWatchdog.stop`, which is 0 unless the step is slow, and
        `guides` are the grammars of the step. The slow grammar's answer may have ended in this
        step. If only one grammar ran, the grammar is rejected at once. If several grammars ran, the
        suspect is rejected once a step of the others stays within the budget. If one of the others
        has ended by then, nothing is rejected, because the ended grammar may have been the slow
        one.

        After a very slow step, the suspect's caller loses all of its answers with new grammars: if
        they ended one by one, the others could take seconds by then. None of these grammars is
        rejected, because any of them may have been the slow one.
        """
        if not seconds:
            if self._accused is not None:
                accused, reason, others = self._accused
                self._accused = None
                if others.issubset(guides):
                    self._grammars.reject(accused, reason)
            return
        if not guides:
            return
        # among equally suspect grammars, choose the newest
        culprit = max(enumerate(guides), key=lambda pair: (self._grammars.suspicion(pair[1]), pair[0]))[1]
        ended = self._answers_to_end(culprit, seconds)
        reason = f"{contract.GUIDE}: the grammar takes too long, {seconds * 1000:.0f} ms per token"
        if ended:
            reason += f" after {max(len(self._sequences[key].generated) for key in ended)} tokens"
        if len(guides) == 1:
            self._grammars.reject(culprit, reason)
        else:
            alone = {culprit}.issuperset(ended.values())
            self._accused = (culprit, reason, {*guides} - {culprit}) if alone else None
            reason = "unavailable for this grammar: the running grammars take too long together; retry later"
        for key in ended:
            self.cancel(key)
            yield StepOutput(key, [], [], FAILED, reason)

    def _answers_to_end(self, culprit: tuple[str, str], seconds: float) -> dict[int, tuple[str, str]]:
        """Return the keys and grammars of the sequences to end.

        Args:
            culprit: The most suspect grammar of the step.
            seconds: The seconds that the step's grammars took.
        """
        is_very_slow = seconds > _VERY_SLOW_BUDGETS * self._options.grammars.token_seconds
        guided = {key: guide for key, one in self._sequences.items() if (guide := one.request.guide) is not None}
        callers = {self._tenant(key) for key, guide in guided.items() if is_very_slow and guide == culprit}
        return {
            key: guide
            for key, guide in guided.items()
            if guide == culprit or (self._tenant(key) in callers and self._grammars.suspicion(guide)[0])
        }

    def _tenant(self, key: int) -> str:
        return self._sequences[key].request.caller.split("/")[0]

    def _record_cached(self, sequence: _Sequence, output: StepOutput) -> None:
        """Record the texts of a sequence that the cache now holds.

        The cache holds the prompt after the first new token, and the answer once the answer is
        complete.
        """
        begins = not sequence.generated
        sequence.generated += output.token_ids
        if not self._has_prefix_cache:
            return
        if (begins and output.token_ids) or output.finish in (STOP, LENGTH):
            request = sequence.request
            answer = np.array(sequence.generated[:-1] if output.finish else (), np.int32)
            ids = np.concatenate((request.input_ids.astype(np.int32), answer))
            self._recent_blocks.touch(ids.tobytes(), request.cache_salt, request.adapter)

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        return self._recent_blocks.take_events()

    def on_idle(self) -> None:
        if self._grammars.memory > self._options.grammars.total // 2:
            self._replace_pipeline()

    def _replace_pipeline(self) -> None:
        """Replace the pipeline, which frees its compiled grammars and cached prefixes.

        Running sequences stay on the old pipeline until they end. Until then, each step runs one
        step of both pipelines.

        Raises:
            RequestRejectedError: The previous pipeline still has sequences.
        """
        if self._old_pipeline is not None and _unfinished(self._old_pipeline):
            raise RequestRejectedError(
                "unavailable until older answers have ended: the engine is replacing its pipeline; retry later"
            )
        self._grammars.close(wait=False)
        older = self._grammars
        self._old_pipeline = self._pipeline if _unfinished(self._pipeline) else None
        # without running sequences, free the old weights before the new ones are loaded
        del self._grammars, self._pipeline
        _libc.malloc_trim(0)
        self._load()
        self._grammars.copy_rejections(older)
        self._recent_blocks.clear()

    def _pipelines(self) -> list[Any]:
        if self._old_pipeline is not None and not _unfinished(self._old_pipeline):
            self._old_pipeline = None
        return [self._pipeline] if self._old_pipeline is None else [self._old_pipeline, self._pipeline]

    def recover(self) -> None:
        # A failed step leaves its sequences marked as scheduled, which makes every further step
        # fail. A step with nothing to schedule releases cancelled sequences at its end.
        for _ in range(_RECOVERY_STEPS):
            unfinished = list(filter(_unfinished, self._pipelines()))
            if not unfinished:
                return
            for pipeline in unfinished:
                with contextlib.suppress(RuntimeError):
                    pipeline.step()
        raise RuntimeError("the pipeline did not release its cancelled requests")

    def _read(self, key: int, sequence: _Sequence) -> StepOutput | None:
        handle = sequence.handle
        if not handle.can_read():
            return self._end_without_tokens(key, handle)
        sequence.started = True
        ids: list[int] = []
        log_probs: list[float] = []
        finish = RUNNING
        while handle.can_read():
            for output in handle.read().values():
                ids += output.generated_ids
                log_probs += output.generated_log_probs
                finish = _REASONS.get(output.finish_reason, RUNNING)
        if sequence.matcher is not None:
            kept = sequence.matcher.find(ids)
            if kept is not None:
                handle.cancel()
                return StepOutput(key, ids[:kept], log_probs[:kept], STOP)
        return StepOutput(key, ids, log_probs, finish)

    def _end_without_tokens(self, key: int, handle: Any) -> StepOutput | None:
        status = handle.get_status()
        if status == _RUNNING:
            return None
        if status == _IGNORED:
            message = f"the KV cache ({self._blocks * TOKENS_PER_BLOCK} tokens) cannot hold this request; shorten it"
            return StepOutput(key, [], [], FAILED, f"{contract.REQUEST_OUTPUT_LEN}: {message}")
        return StepOutput(key, [], [], STOP)

    def stats(self) -> EngineStats:
        metrics = self._pipeline.get_metrics()
        prefill = [sequence.unread for sequence in self._sequences.values() if not sequence.started]
        active = len(self._sequences)
        scheduled = min(metrics.scheduled_requests, active)
        return EngineStats(
            active=active,
            scheduled=scheduled,
            waiting=active - scheduled,
            context=len(prefill),
            context_tokens=sum(prefill),
            iteration=self._iteration,
            kv_blocks_max=self._blocks,
            # GenAI updates its usage only while it schedules, so an idle pipeline reports an old
            # value; all blocks of an idle pipeline are free
            kv_blocks_used=round(metrics.cache_usage / 100 * self._blocks) if active else 0,
            tokens_per_block=TOKENS_PER_BLOCK,
            max_requests=self._options.max_batch_size,
        )

    def close(self) -> None:
        self._grammars.close()
        for key in list(self._sequences):
            self.cancel(key)
        with contextlib.suppress(RuntimeError):
            self.recover()


def _unfinished(pipeline: Any) -> bool:
    return bool(pipeline.has_non_finished_requests())


def generation_config(request: RuntimeRequest, sequence: int) -> Any:
    """Return GenAI's parameters for one sequence of a request.

    Raises RequestRejectedError for parameters that GenAI does not support.
    """
    sampling = request.sampling
    _check_sampling(sampling)
    config = genai.GenerationConfig()
    config.max_new_tokens = request.max_new_tokens
    config.min_new_tokens = request.min_tokens
    config.stop_token_ids = set(request.end_ids) | {word[0] for word in request.stop_words if len(word) == 1}
    # Without an end token GenAI would use the model's end token. Only tokens in the request may end
    # a sequence.
    config.eos_token_id = min(config.stop_token_ids, default=-1)
    config.ignore_eos = not config.stop_token_ids
    config.logprobs = int(request.log_probs)
    config.repetition_penalty = sampling.repetition_penalty
    config.presence_penalty = sampling.presence_penalty
    config.frequency_penalty = sampling.frequency_penalty
    if not sampling.greedy:
        config.do_sample = True
        config.temperature = sampling.temperature
        config.top_p = sampling.top_p
        config.min_p = sampling.min_p
        if sampling.top_k:
            config.top_k = sampling.top_k
        config.rng_seed = _seed(sampling.seed, sequence)
    if request.guide is not None:
        config.structured_output_config = structured_output(request.guide)
    return config


def _check_sampling(sampling: RuntimeSamplingParams) -> None:
    """Raise RequestRejectedError for values that GenAI rejects, with the tensor's name."""
    penalties = {
        contract.PRESENCE_PENALTY: sampling.presence_penalty,
        contract.FREQUENCY_PENALTY: sampling.frequency_penalty,
    }
    for tensor, value in penalties.items():
        if not -2 <= value <= 2:
            raise RequestRejectedError(f"{tensor}: must be from -2 to 2 for target openvino, got {value:g}")
    if sampling.min_p >= 1 and not sampling.greedy:
        raise RequestRejectedError(
            f"{contract.RUNTIME_MIN_P}: must be below 1 for target openvino, got {sampling.min_p:g}"
        )


def _seed(seed: int | None, sequence: int) -> int:
    # Without a seed GenAI would use 0 for all requests. Each sequence gets a different seed.
    return int.from_bytes(os.urandom(4), "little") if seed is None else (seed + sequence) % 2**32


def _smallest_chunk(options: OpenVINOOptions) -> int:
    """Return the chunk size to begin with: the largest size if no steps are measured.

    The chunk size is at least twice the maximum batch size, so that a full batch leaves room for
    prompts.
    """
    max_chunk = options.max_num_tokens
    if options.step_seconds is None or options.max_seq_len < 2 * max_chunk or max_chunk < 2 * _MEASURED_CHUNK:
        return max_chunk
    return smallest_chunk(max_chunk, 2 * options.max_batch_size)


def _keeps_objective(pipeline: Any, chunk: int, options: OpenVINOOptions) -> bool:
    """Return True if the longest prompt's mean step takes at most `options.step_seconds`.

    The prompt is read in chunks of `chunk` tokens.
    """
    limit = options.step_seconds
    assert limit is not None
    steps = _measure_steps(pipeline, [chunk] * max(2, _measured_chunks(chunk, options)), options, limit)
    # steps take longer with depth, so all steps after a measured step that is too long are too long
    return steps[-1].seconds <= limit and mean_seconds(steps, chunk, options.max_seq_len) <= limit


def _calibrated_chunk(pipeline: Any, options: OpenVINOOptions) -> int:
    """Measure steps, and return the largest chunk that keeps `options.step_seconds`."""
    assert options.step_seconds is not None
    max_chunk = options.max_num_tokens
    sizes = [*[max_chunk] * max(1, _measured_chunks(max_chunk, options)), _MEASURED_CHUNK, 1]
    return largest_chunk(
        _measure_steps(pipeline, sizes, options),
        seconds=options.step_seconds,
        prompt_length=options.max_seq_len,
        max_chunk=max_chunk,
        min_chunk=2 * options.max_batch_size,
    )


def _measured_chunks(chunk: int, options: OpenVINOOptions) -> int:
    return min(_MEASURED_PROMPT, options.max_seq_len - options.max_num_tokens) // chunk


def _measure_steps(
    pipeline: Any, sizes: list[int], options: OpenVINOOptions, limit: float = math.inf
) -> list[MeasuredStep]:
    """Return the durations of steps that read a prompt in chunks of these sizes.

    The measurement ends after the first step longer than `limit` seconds. A last size of 1 stands
    for the step that computes the second new token.
    """
    config = genai.GenerationConfig()
    config.max_new_tokens = 2
    config.ignore_eos = True
    # use random tokens, which are not in the prefix cache
    tokens = np.random.default_rng().integers(options.vocab_size, size=(1, sum(sizes) - (sizes[-1] == 1)))
    handle = pipeline.add_request(0, ov.Tensor(tokens), config)
    steps: list[MeasuredStep] = []
    begun = time.monotonic()
    while len(steps) < len(sizes) and (len(steps) < 2 or time.monotonic() - begun < _MEASURING_SECONDS):
        size, depth, started = sizes[len(steps)], sum(step.tokens for step in steps), time.monotonic()
        pipeline.step()
        steps.append(MeasuredStep(size, depth, time.monotonic() - started))
        if steps[-1].seconds > limit:
            break
    if _unfinished(pipeline):
        handle.cancel()
        pipeline.step()
    return steps


def _scheduler(options: OpenVINOOptions, blocks: int, chunk: int, prefix_cache: bool) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = blocks
    scheduler.max_num_seqs = options.max_batch_size
    scheduler.max_num_batched_tokens = chunk
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = prefix_cache
    return scheduler


def _kv_blocks(options: OpenVINOOptions) -> int:
    """Return the number of KV-cache blocks.

    The number is configured, or else the number of blocks that fit into the default memory. The
    blocks always hold one sequence of maximum length, and at most a full batch of such sequences.
    """
    per_sequence = -(-options.max_seq_len // TOKENS_PER_BLOCK) + 1
    most = per_sequence * options.max_batch_size
    if options.cache_tokens is not None:
        wanted = -(-options.cache_tokens // TOKENS_PER_BLOCK)
    else:
        wanted = _default_cache_bytes() // _block_bytes(options)
    return max(per_sequence, min(most, wanted))


def _block_bytes(options: OpenVINOOptions) -> int:
    shape = options.kv_cache
    # OpenVINO stores keys and values as u8 on CPUs by default: one byte per element, plus scales
    width = {"f32": 4, "f16": 2, "bf16": 2}.get(str(options.properties.get("KV_CACHE_PRECISION", "u8")), 1)
    return 2 * shape["layers"] * shape["kv_heads"] * TOKENS_PER_BLOCK * (shape["head_dim"] * width + 8)


def _default_cache_bytes() -> int:
    """Return a quarter of the memory of the machine or container in bytes, at most 8 GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(min(total, _container_memory()) // 4, 8 << 30)


def _container_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory limit of this process's cgroup in bytes, or 2**62 without a limit.

    The limit is read from cgroup version 2 or, where that is missing, from version 1.
    """
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        # version 2 writes "max" for no limit, version 1 a number close to 2**63
        with contextlib.suppress(OSError, ValueError):
            return min(int((cgroup / name).read_text()), 2**62)
    return 2**62
