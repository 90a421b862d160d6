"""The mock engine with a KV cache: in-flight batching, chunked prefill, prefix reuse, preemption, and no model."""

import random
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import llmops_contract as contract
from llmops_kv_blocks import adapter_salt, block_hashes

from ..engine_runtime import DeadEngineError, EngineRuntime, EngineStats, KvCacheEvent, StepOutput
from ..request import RequestRejectedError, RuntimeRequest
from .faults import FaultFile
from .kv_cache import KvCache
from .mock import Sequence, refuse_what_chooses
from .script import Script
from .step_times import StepTable


@dataclass(frozen=True)
class PagedOptions:
    """`blocks` of `tokens_per_block`; a step takes at most `max_num_tokens`, of prompts and of running sequences, and
    `factor` times what `steps` says, with `noise` (the standard deviation of its logarithm). `name`: of the
    model, for its faults."""

    max_batch_size: int
    blocks: int
    tokens_per_block: int
    max_num_tokens: int
    steps: StepTable
    factor: float = 1.0
    noise: float = 0.0
    name: str = ""


class _Sequence(Sequence):
    """`ids`: prompt and answer so far, of which `computed` are in the cache, in `names` and `unnamed` blocks; `said`:
    the names of all its full blocks, whether or not it holds them."""

    __slots__ = ("cached", "computed", "ids", "key", "names", "prompt", "said", "salt", "unnamed")

    def __init__(self, key: int, request: RuntimeRequest, answer: Iterator[int]) -> None:
        words = [[token] for token in request.end_ids] + [word for word in request.stop_words if word]
        super().__init__(answer, request, words)
        self.key = key
        self.ids = array("i", request.input_ids.tolist())
        self.prompt = len(self.ids)
        self.computed = self.unnamed = 0
        self.names: list[int] = []
        self.said: list[int] = []
        self.salt = adapter_salt(request.cache_salt, request.adapter)
        # prompt tokens that were found in the cache; None before it ran, and once that was reported
        self.cached: int | None = None

    @property
    def unread(self) -> int:
        return len(self.ids) - self.computed

    def names_of_full_blocks(self, size: int) -> list[int]:
        """Each stands for all before it as well."""
        if (len(self.said) + 1) * size <= len(self.ids):
            rest = self.ids[len(self.said) * size :].tobytes()
            self.said += block_hashes(rest, size, self.said[-1] if self.said else self.salt)
        return self.said

    def advance(self, token: int) -> str:
        """Take the next token; why the sequence ends with it, or RUNNING."""
        self.ids.append(token)
        return self.ended_by(token)


class PagedMockRuntime(EngineRuntime):
    """First come, first served; when the cache is full the youngest makes room and starts over later.

    A step counts from the planned end of the one before it: what the machine takes in between (a GPU would not wait for
    it) makes no step longer, unless it is more than a step.
    """

    def __init__(self, options: PagedOptions, script: Script, faults: FaultFile) -> None:
        self._options = options
        self._script = script
        self._faults = faults
        self._cache = KvCache(options.blocks)
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._dropped = self._iteration = self._prefilled = self._paused = self._reused = 0
        self._rng = random.Random(options.factor)
        # when the last step was to end, where another follows it at once
        self._due = 0.0

    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        if self._faults.now().refuse:
            raise RequestRejectedError(f"{contract.QUEUE_FULL_PREFIX}: told to refuse")
        refuse_what_chooses(request)
        most = request.input_ids.size + request.max_new_tokens
        if self._blocks_of(most) > self._options.blocks:
            size = self._options.tokens_per_block
            raise RequestRejectedError(
                f"{contract.INPUT_IDS}: the KV cache has {self._options.blocks * size} tokens, not {most}"
            )
        if not self.has_work():
            self._due = 0.0
        prompt = request.input_ids.tolist()
        if self._options.name in self._faults.now().scramble:
            prompt.append(0)
        self._waiting.append(_Sequence(key, request, self._script.after(prompt)))

    def cancel(self, key: int) -> None:
        for one in [*self._running, *self._waiting]:
            if one.key == key:
                self._remove(one)
                return

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self) -> Iterable[StepOutput]:
        faults = self._faults.now()
        if faults.die:
            raise DeadEngineError("told to die")
        if faults.drop_kv != self._dropped:
            self._dropped = faults.drop_kv
            self._cache.drop()
        begun = time.perf_counter()
        self._paused = 0
        if faults.stall:
            time.sleep(self._options.steps.seconds(1, 1))
            return []
        chunks = self._schedule()
        planned = faults.slow * self._options.factor * self._duration(chunks)
        if self._options.noise:
            planned *= self._rng.lognormvariate(0.0, self._options.noise)
        self._due = planned + (self._due if begun - self._due < planned else begun)
        time.sleep(max(0.0, self._due - time.perf_counter()))
        self._iteration += 1
        return [output for one, chunk in chunks for output in self._compute(one, chunk)]

    def _schedule(self) -> list[tuple[_Sequence, int]]:
        """Return the sequences that this step computes, with the number of tokens of each.

        Running sequences get their token first.
        """
        self._admit()
        room, chunks = self._options.max_num_tokens, []
        decoding = [one for one in self._running if one.unread == 1]
        for one in [*decoding, *(one for one in self._running if one.unread > 1)]:
            chunk = min(one.unread, room)
            if chunk and one in self._running and self._make_room(one, chunk):
                chunks.append((one, chunk))
                room -= chunk
        # a scheduled one may have been preempted by an older one since
        return [(one, chunk) for one, chunk in chunks if one in self._running]

    def _admit(self) -> None:
        size = self._options.tokens_per_block
        while self._waiting and len(self._running) < self._options.max_batch_size:
            one = self._waiting[0]
            names = one.names_of_full_blocks(size)
            # the last token is always computed: its logits are the next one's
            found = names[: min(self._cache.found(names), (len(one.ids) - 1) // size)]
            self._cache.hold(found)
            if self._blocks_of(len(one.ids)) - len(found) > self._cache.free:
                self._cache.let_go(found, 0)
                return
            self._waiting.popleft()
            self._running.append(one)
            one.names, one.computed = list(found), len(found) * size
            self._reused += len(found)
            if len(one.ids) == one.prompt:
                one.cached = one.computed

    def _make_room(self, one: _Sequence, chunk: int) -> bool:
        """Blocks for `chunk` more tokens; False when it had to make room itself."""
        while not self._cache.take(self._missing(one, chunk)):
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is one:
                return False
        one.unnamed += self._missing(one, chunk)
        return True

    def _missing(self, one: _Sequence, chunk: int) -> int:
        return self._blocks_of(one.computed + chunk) - len(one.names) - one.unnamed

    def _preempt(self, one: _Sequence) -> None:
        self._paused += 1
        self._running.remove(one)
        self._free(one)
        self._waiting.appendleft(one)

    def _free(self, one: _Sequence) -> None:
        self._cache.let_go(one.names, one.unnamed)
        one.names, one.unnamed, one.computed = [], 0, 0

    def _remove(self, one: _Sequence) -> None:
        if one in self._running:
            self._running.remove(one)
            self._free(one)
        else:
            self._waiting.remove(one)

    def _duration(self, chunks: list[tuple[_Sequence, int]]) -> float:
        decoding = [one for one, chunk in chunks if chunk == one.unread == 1]
        reading = [(one, chunk) for one, chunk in chunks if not chunk == one.unread == 1]
        self._prefilled = sum(chunk for _, chunk in reading)
        length = sum(len(one.ids) for one in decoding) / max(1, len(decoding))
        prefix = sum(one.computed * chunk for one, chunk in reading) / max(1, self._prefilled)
        return self._options.steps.seconds(len(decoding), length, self._prefilled, prefix)

    def _compute(self, one: _Sequence, chunk: int) -> Iterator[StepOutput]:
        one.computed += chunk
        size = self._options.tokens_per_block
        for name in one.names_of_full_blocks(size)[len(one.names) : one.computed // size]:
            self._cache.name(name)
            one.names.append(name)
            one.unnamed -= 1
        if one.unread:
            return
        cached, one.cached = one.cached, None
        token = next(one.answer)
        finish = one.advance(token)
        if finish:
            self._remove(one)
        yield StepOutput(one.key, [token], [], finish, cached=cached)

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._options.tokens_per_block)

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        lost, removed, stored = self._cache.changes()
        if lost:
            yield KvCacheEvent(contract.KV_CLEARED)
        for kind, names in ((contract.KV_REMOVED, removed), (contract.KV_STORED, stored)):
            if names:
                yield KvCacheEvent(kind, names)

    def stats(self) -> EngineStats:
        """The truth, unless it was told to lie."""
        unread = sum(one.unread for one in self._waiting) + sum(one.unread for one in self._running if one.unread > 1)
        stats = EngineStats(
            active=len(self._running) + len(self._waiting),
            scheduled=len(self._running),
            waiting=len(self._waiting),
            context=sum(one.unread > 1 for one in self._running),
            context_tokens=unread,
            iteration=self._iteration,
            kv_blocks_max=self._options.blocks,
            kv_blocks_used=self._options.blocks - self._cache.free,
            tokens_per_block=self._options.tokens_per_block,
            max_requests=self._options.max_batch_size,
            kv_blocks_reused=self._reused,
            paused=self._paused,
            prefilled=self._prefilled,
        )
        return stats._replace(**self._faults.now().lie)
