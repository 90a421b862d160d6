"""OpenVINO GenAI's continuous batching: paged KV cache, prefix cache, chunked prefill, one `step()` at a time."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
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
from ..guided.sandbox import GrammarLimits, GrammarSandbox, command
from ..guided.watchdog import GrammarWatchdog, sampler_threads, thread_times
from ..recent_blocks import RecentBlocks
from ..request import RequestRejectedError, RuntimeRequest, RuntimeSamplingParams
from .chunk_size import MeasuredStep, largest_chunk
from .stop_words import StopWordMatcher

# OpenVINO's CPU plugin pages the KV cache in blocks of this many tokens.
TOKENS_PER_BLOCK = 32
_RUNNING = genai.GenerationStatus.RUNNING
_IGNORED = genai.GenerationStatus.IGNORED
_RECOVERY_STEPS = 3
_SHARED = (
    "openvino.prefix_cache is true: tenants share the prefix cache, so the time of a first token tells whether another "
    "tenant has sent the same prompt. Leave prefix_cache out of engine.json where tenants must not know of each other."
)
#: Tokens of the second prompt that warms the engine up: enough for all threads that compute the model to take part.
_WARM_UP = 128
#: Objective for the mean step while the longest prompt is read, in seconds. About what a
#: reader takes for a token; larger chunks read a long prompt faster and hold up others longer.
STEP_SECONDS = 0.1
#: Tokens of the prompt by which chunks are measured, beside a chunk of `max_num_tokens`.
_MEASURED_PROMPT = 1024
_MEASURED_CHUNK = 32
#: A large model is measured by fewer steps than the prompt has.
_MEASURING_SECONDS = 3.0
_libc = ctypes.CDLL(None)
_REASONS = {genai.GenerationFinishReason.LENGTH: LENGTH, genai.GenerationFinishReason.STOP: STOP}


@dataclass(frozen=True)
class OpenVINOOptions:
    """`properties` go to OpenVINO as they are (KV_CACHE_PRECISION, …); `kv_cache` has the model's
    `layers`, `kv_heads` and `head_dim`; `prefix_cache` None gives it up with the first request of a tenant.

    `step_seconds`: the mean step while the longest prompt is read; chunks shrink from `max_num_tokens` to keep it.
    None: chunks of `max_num_tokens`."""

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


def create(parameters: dict[str, str], card: dict[str, Any]) -> EngineRuntime:
    own = json.loads(parameters["openvino"])
    cache = parameters.get("max_tokens_in_paged_kv_cache")
    return OpenVINORuntime(
        OpenVINOOptions(
            model_path=Path(parameters["gpt_model_path"]),
            max_batch_size=card["max_batch_size"],
            max_seq_len=card["max_seq_len"],
            vocab_size=card["vocab_size"],
            max_num_tokens=int(parameters["max_num_tokens"]),
            cache_tokens=int(cache) if cache else None,
            device=own.get("device", "CPU"),
            properties=own.get("properties", {}),
            kv_cache=own["kv_cache"],
            grammars=GrammarLimits(**own.get("grammars", {})),
            prefix_cache=own.get("prefix_cache"),
            step_seconds=own.get("step_seconds", STEP_SECONDS),
        )
    )


class _Sequence:
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
    """Token ids in, token ids out: the pipeline's own tokenizer is not used."""

    def __init__(self, options: OpenVINOOptions) -> None:
        self._options = options
        self._blocks = _kv_blocks(options)
        self._sequences: dict[int, _Sequence] = {}
        self._iteration = 0
        self._leaving: Any = None
        self._recent = RecentBlocks(self._blocks, TOKENS_PER_BLOCK)
        self._caches = options.prefix_cache is not False
        if options.prefix_cache:
            print(_SHARED, file=sys.stderr, flush=True)
        self._watch = GrammarWatchdog(options.grammars.token_seconds)
        # the grammar that was ended last while others ran: refused once a step without it is within its budget
        self._accused: tuple[tuple[str, str], str] | None = None
        self._chunk = options.max_num_tokens
        if options.step_seconds is not None:
            self._chunk = _calibrated_chunk(self._new_pipeline(prefix_cache=False), options)
            _libc.malloc_trim(0)
        self._load()

    def _new_pipeline(self, prefix_cache: bool) -> Any:
        options = self._options
        scheduler = _scheduler(options, self._blocks, self._chunk, prefix_cache)
        return genai.ContinuousBatchingPipeline(str(options.model_path), scheduler, options.device, options.properties)

    def _load(self) -> None:
        options = self._options
        known = thread_times()
        self._pipeline = self._new_pipeline(self._caches)
        self._warm_up(known)
        tokenizer = self._pipeline.get_tokenizer()
        self._grammars = GrammarService(
            lambda niceness: GrammarSandbox(*command(options.model_path, options.vocab_size, niceness)),
            lambda: GrammarPipeline(tokenizer, options.vocab_size),
            lambda: self.wake(),
            options.grammars,
        )

    def _warm_up(self, known: Iterable[int]) -> None:
        """Take the first step, which is long, and find the sampler's threads beside those `known` before the pipeline.

        It also makes the tokenizer's grammar compiler, which is not safe to do in two threads at once.
        """
        config = genai.GenerationConfig()
        config.max_new_tokens = 1
        self._pipeline.generate([ov.Tensor(np.zeros((1, 1), np.int64))], [config])
        before = thread_times()
        self._pipeline.generate([ov.Tensor(np.ones((1, _WARM_UP), np.int64))], [config])
        self._watch.watch_threads(sampler_threads(known, before, thread_times()))

    def prepare(self, request: RuntimeRequest) -> Preparation | None:
        if request.cache_salt and self._caches and self._options.prefix_cache is None:
            self._give_up_cache()
        if request.guide is None:
            return None
        structured_output(request.guide)
        if self._grammars.memory > self._options.grammars.total and not self._grammars.knows(request.guide):
            self._renew()
        return self._grammars.prepare(request.guide, request.caller)

    def _give_up_cache(self) -> None:
        """Go on without a prefix cache: GenAI cannot keep tenants apart in it, and time would tell what others asked.

        A gateway sends salts where each tenant has a cache of its own. Running sequences end on the old pipeline.
        """
        self._caches = False
        try:
            self._renew()
        except RequestRejectedError:
            self._caches = True
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
        # step() keeps the GIL: whatever else this process does in Python happens between two steps.
        guides = {sequence.request.guide for sequence in self._sequences.values()} - {None}
        self._watch.start()
        for pipeline in self._pipelines():
            pipeline.step()
        over = self._watch.stop(len(self._sequences), self._expected() if guides else None)
        self._iteration += 1
        self._count_read()
        for key, sequence in list(self._sequences.items()):
            output = self._read(key, sequence)
            if output is not None:
                self._note(sequence, output)
                if output.finish:
                    self._sequences.pop(key, None)
                    if output.finish != FAILED and sequence.request.guide is not None:
                        self._grammars.finished(sequence.request.guide)
                yield output
        yield from self._end_grammar(over)

    def _count_read(self) -> None:
        """Take what the last step read off the prompts: GenAI fills a step with running answers, then prompts in order.

        A prompt with a cached prefix is shorter than that, and counts one token until it is seen to have begun.
        """
        room = self._chunk - sum(sequence.started for sequence in self._sequences.values())
        for sequence in self._sequences.values():
            if not sequence.started:
                read = min(max(room, 0), sequence.unread - 1)
                sequence.unread -= read
                room -= read

    def _expected(self) -> float:
        """Return the seconds that the grammars of all running sequences take in a step as a rule."""
        guides = (sequence.request.guide for sequence in self._sequences.values())
        return sum(self._grammars.mean_seconds(guide) for guide in guides if guide is not None)

    def _end_grammar(self, seconds: float) -> Iterator[StepOutput]:
        """End the sequences of the most suspect grammar after a step whose grammars took too many `seconds`.

        Where several grammars ran, the next step tells: without the culprit, it is within its budget.
        """
        if not seconds:
            if self._accused is not None:
                self._grammars.refuse(*self._accused)
                self._accused = None
            return
        guides = dict.fromkeys(sequence.request.guide for sequence in self._sequences.values())
        suspects = [guide for guide in guides if guide is not None]
        if not suspects:
            return
        # of equal ones the newest
        culprit = max(enumerate(suspects), key=lambda one: (self._grammars.suspicion(one[1]), one[0]))[1]
        keys = [key for key, sequence in self._sequences.items() if sequence.request.guide == culprit]
        tokens = max(len(self._sequences[key].generated) for key in keys)
        why = f"{contract.GUIDE}: the grammar takes {seconds * 1000:.0f} ms per token after {tokens} tokens"
        if len(suspects) == 1:
            self._grammars.refuse(culprit, why)
        else:
            self._accused = (culprit, why)
            why = "unavailable for this grammar: the grammars that run here take too long at the moment"
        for key in keys:
            self.cancel(key)
            yield StepOutput(key, [], [], FAILED, why)

    def _note(self, sequence: _Sequence, output: StepOutput) -> None:
        """The cache has a prompt from its first token on, and the answer too once it is complete."""
        begins = not sequence.generated
        sequence.generated += output.token_ids
        if not self._caches:
            return
        if (begins and output.token_ids) or output.finish in (STOP, LENGTH):
            request = sequence.request
            answer = np.array(sequence.generated[:-1] if output.finish else (), np.int32)
            ids = np.concatenate((request.input_ids.astype(np.int32), answer))
            self._recent.use(ids.tobytes(), request.cache_salt, request.adapter)

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        return self._recent.changes()

    def rest(self) -> None:
        if self._grammars.memory > self._options.grammars.total // 2:
            self._renew()

    def _renew(self) -> None:
        """Let another pipeline take over: compiled grammars and cached prefixes live as long as their pipeline.

        Running sequences end on the old one; until then each step is one of both. Raises Refused while there is one.
        """
        if self._leaving is not None and _unfinished(self._leaving):
            raise RequestRejectedError("unavailable until older answers have ended: the engine changes its pipeline")
        self._grammars.close(wait=False)
        older = self._grammars
        self._leaving = self._pipeline if _unfinished(self._pipeline) else None
        # where the old one is no longer needed, its weights go before those of the new one come
        del self._grammars, self._pipeline
        _libc.malloc_trim(0)
        self._load()
        self._grammars.copy_refusals(older)
        self._recent.clear()

    def _pipelines(self) -> list[Any]:
        if self._leaving is not None and not _unfinished(self._leaving):
            self._leaving = None
        return [self._pipeline] if self._leaving is None else [self._leaving, self._pipeline]

    def recover(self) -> None:
        # A step that fails leaves its sequences marked as scheduled, and each further step fails because of them. They
        # go, cancelled, at the end of a step that has nothing to schedule.
        for _ in range(_RECOVERY_STEPS):
            unfinished = list(filter(_unfinished, self._pipelines()))
            if not unfinished:
                return
            for pipeline in unfinished:
                with contextlib.suppress(RuntimeError):
                    pipeline.step()
        raise RuntimeError("the pipeline still holds requests that were cancelled")

    def _read(self, key: int, sequence: _Sequence) -> StepOutput | None:
        handle = sequence.handle
        if not handle.can_read():
            return self._ended_silently(key, handle)
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

    def _ended_silently(self, key: int, handle: Any) -> StepOutput | None:
        status = handle.get_status()
        if status == _RUNNING:
            return None
        if status == _IGNORED:
            message = f"the KV cache ({self._blocks * TOKENS_PER_BLOCK} tokens) cannot hold this request"
            return StepOutput(key, [], [], FAILED, f"{contract.REQUEST_OUTPUT_LEN}: {message}")
        return StepOutput(key, [], [], STOP)

    def stats(self) -> EngineStats:
        metrics = self._pipeline.get_metrics()
        prefill = [s.unread for s in self._sequences.values() if not s.started]
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
            # the pipeline measures while it schedules; with nothing left to schedule all blocks are free again
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
    """GenAI's parameters for one sequence of a request; each further sequence has a seed of its own. Raises Refused."""
    sampling = request.sampling
    _check_sampling(sampling)
    config = genai.GenerationConfig()
    config.max_new_tokens = request.max_new_tokens
    config.min_new_tokens = request.min_tokens
    config.stop_token_ids = set(request.end_ids) | {word[0] for word in request.stop_words if len(word) == 1}
    # GenAI adds the model's own end of text unless it is told another: what the request says is all that ends it
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
    """What GenAI refuses itself, under the contract's names."""
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
    # Without a seed GenAI would use 0 for everyone.
    return int.from_bytes(os.urandom(4), "little") if seed is None else (seed + sequence) % 2**32


def _calibrated_chunk(pipeline: Any, options: OpenVINOOptions) -> int:
    """Measure the steps of `pipeline` with one prompt, and return the chunk that keeps `options.step_seconds`.

    Full batches need room for prompts, so a chunk has at least twice the tokens of a full batch's step.
    """
    most, length = options.max_num_tokens, options.max_seq_len
    if options.step_seconds is None or length < 2 * most or most < 2 * _MEASURED_CHUNK:
        return most
    config = genai.GenerationConfig()
    config.max_new_tokens = 2
    config.ignore_eos = True
    # the first step is long, and so is the first one of a size
    pipeline.generate([ov.Tensor(np.zeros((1, 1), np.int64)), ov.Tensor(np.ones((1, most), np.int64))], [config] * 2)
    chunks = max(1, min(_MEASURED_PROMPT, length - most) // most)
    sizes = [*[most] * chunks, _MEASURED_CHUNK, 1]
    handle = pipeline.add_request(0, ov.Tensor(np.ones((1, sum(sizes) - 1), np.int64)), config)
    steps: list[MeasuredStep] = []
    begun = time.monotonic()
    while len(steps) < len(sizes) and (len(steps) < 2 or time.monotonic() - begun < _MEASURING_SECONDS):
        size, depth, started = sizes[len(steps)], sum(step.tokens for step in steps), time.monotonic()
        pipeline.step()
        steps.append(MeasuredStep(size, depth, time.monotonic() - started))
    if _unfinished(pipeline):
        handle.cancel()
        pipeline.step()
    return largest_chunk(steps, options.step_seconds, length, most, 2 * options.max_batch_size)


def _scheduler(options: OpenVINOOptions, blocks: int, chunk: int, prefix_cache: bool) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = blocks
    scheduler.max_num_seqs = options.max_batch_size
    scheduler.max_num_batched_tokens = chunk
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = prefix_cache
    return scheduler


def _kv_blocks(options: OpenVINOOptions) -> int:
    """What the engine was given, else what fits into the default memory; never more than the batch can use, and
    never less than one sequence needs."""
    per_sequence = -(-options.max_seq_len // TOKENS_PER_BLOCK) + 1
    most = per_sequence * options.max_batch_size
    if options.cache_tokens is not None:
        wanted = -(-options.cache_tokens // TOKENS_PER_BLOCK)
    else:
        wanted = _default_cache_bytes() // _block_bytes(options)
    return max(per_sequence, min(most, wanted))


def _block_bytes(options: OpenVINOOptions) -> int:
    shape = options.kv_cache
    # keys and values, one byte per element plus scales: OpenVINO stores the cache as u8 on CPUs by default
    width = {"f32": 4, "f16": 2, "bf16": 2}.get(str(options.properties.get("KV_CACHE_PRECISION", "u8")), 1)
    return 2 * shape["layers"] * shape["kv_heads"] * TOKENS_PER_BLOCK * (shape["head_dim"] * width + 8)


def _default_cache_bytes() -> int:
    """Return a quarter of the memory of the machine, or of its container, and at most 8 GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(min(total, _container_memory()) // 4, 8 << 30)


def _container_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory limit of this process's cgroup (version 2, else 1) in bytes, or 2**62 without one."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        # "max" stands for no limit in version 2; version 1 has a number close to 2**63 instead
        with contextlib.suppress(OSError, ValueError):
            return min(int((cgroup / name).read_text()), 2**62)
    return 2**62
