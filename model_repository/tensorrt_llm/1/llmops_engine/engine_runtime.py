"""What the engine model needs of a library that generates: `EngineRuntime`, one implementation per library.

A runtime is driven by one thread (`loop.py`) and need not be thread-safe.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .request import RuntimeRequest

RUNNING, STOP, LENGTH, CANCELLED, FAILED = "", "stop", "length", "cancelled", "failed"


#: The most likely tokens at one place with their log-probabilities, the likeliest first.
Alternatives = list[tuple[int, float]]


class StepOutput(NamedTuple):
    """What one step added to one sequence. `log_probs` and `tops` are empty unless asked for.

    `finish`: RUNNING while more follows, else why it ended; with FAILED, `error` says what happened. `cached`: with a
    sequence's first tokens, how many of its prompt were in the KV cache; None: not known.
    """

    key: int
    token_ids: list[int]
    log_probs: list[float]
    finish: str = RUNNING
    error: str = ""
    cached: int | None = None
    tops: list[Alternatives] = []  # noqa: RUF012 - never changed


class KvCacheEvent(NamedTuple):
    """What the KV cache gained or lost: KV_STORED or KV_REMOVED with names of blocks (llmops_kv_blocks), or KV_CLEARED."""

    kind: int
    names: Sequence[int] = ()


class EngineStats(NamedTuple):
    """Sequences and KV-cache blocks after a step. `scheduled`: in the last step; `context`: of these, in prefill;
    `paused`: those that it put back for want of cache.

    `memory` in bytes by kind (cpu, gpu, pinned); None and 0 blocks: not known. `ended`: (prompt, generated) tokens of
    each request that ended since the last report, added by the loop. `prefilled`: prompt tokens that the last step
    computed; None: the loop takes the prompts whose first token it brought.
    """

    active: int
    scheduled: int
    waiting: int
    context: int
    context_tokens: int
    iteration: int
    kv_blocks_max: int
    kv_blocks_used: int
    tokens_per_block: int
    max_requests: int
    kv_blocks_reused: int | None = None
    paused: int = 0
    memory: tuple[tuple[str, int], ...] = ()
    ended: tuple[tuple[int, int], ...] = ()
    prefilled: int | None = None


class EngineState(NamedTuple):
    """What `step_state` says; see STATE_FIELDS of the contract."""

    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    blocks: int
    tokens_per_block: int
    prefill_tokens: int
    step_us: int
    subscribers: int = 0
    demand: int = 0
    draining: int = 0
    next_slot: int = 0


class DeadEngineError(Exception):
    """The library cannot generate any more; the text says why."""


class Preparation:
    """What a request waits for before it can join. Made and counted on the engine thread, finished on another one."""

    def __init__(self) -> None:
        self.done = False
        self.refusal = ""
        self.dropped = False
        self._waiting = 0
        self._lock = threading.Lock()

    def join(self) -> bool:
        """One more request waits; False when it was dropped."""
        with self._lock:
            self._waiting += not self.dropped
            return not self.dropped

    def leave(self) -> None:
        """A request that waited is gone."""
        with self._lock:
            self._waiting -= 1

    def drop_if_unwanted(self) -> bool:
        """Asked before the work starts: whether nobody wants it any more; it is then over."""
        with self._lock:
            self.dropped = self._waiting <= 0
            return self.dropped

    def finish(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.done = True


class EngineRuntime(ABC):
    """Generates for many sequences at once; a sequence may join and leave between any two steps.

    `wake` may be called from any thread when a preparation is done.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)

    def prepare(self, request: RuntimeRequest) -> Preparation | None:
        """What `submit` has to wait for, joined once for this request; None if nothing. Raises Refused."""
        return None

    @abstractmethod
    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        """Start sequence number `sequence` of `request` under `key`. Raises Refused."""

    @abstractmethod
    def cancel(self, key: int) -> None:
        """Take a sequence out before the next step; nothing of it is returned any more."""

    @abstractmethod
    def has_work(self) -> bool: ...

    @abstractmethod
    def step(self) -> Iterable[StepOutput]:
        """Advance all sequences by (at least) one token and return what is new; blocks meanwhile. Raises DeadEngineError."""

    def rest(self) -> None:
        """Called when there is nothing to do: the time for work that would hold up running sequences."""
        return

    def recover(self) -> None:
        """Called after a step failed and every sequence was cancelled: make the next request possible."""
        return

    @abstractmethod
    def stats(self) -> EngineStats: ...

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        """What the KV cache gained and lost since the last call, in order; nothing where the library does not say."""
        return ()

    def close(self) -> None:
        """Free what the library holds."""
        return
