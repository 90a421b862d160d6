"""The interface between the engine model and a library that generates: `EngineRuntime`.

Each library has one implementation in `runtimes/`. One thread (`loop.py`) drives a runtime, so it
need not be thread-safe.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .request import RuntimeRequest

#: Reasons why a sequence ended; RUNNING while more tokens follow.
RUNNING, STOP, LENGTH, FAILED = "", "stop", "length", "failed"
#: Prefix of the error of a request that is not at fault itself: it may succeed on another replica.
ENGINE_FAILED = "the engine failed"

#: The most likely tokens at one position with their log-probabilities, in descending order.
Alternatives = list[tuple[int, float]]


class StepOutput(NamedTuple):
    """The tokens that one step added to one sequence.

    `log_probs` and `tops` are empty unless the request asks for them. `finish` is RUNNING or the
    reason why the sequence ended; `error` explains FAILED. `cached` comes with the first tokens:
    the number of prompt tokens that were in the KV cache, or None if the library does not report
    it. `prompt` comes with the first tokens, too, for a request that asks for it: the most likely
    tokens in place of each prompt token but the first.
    """

    key: int
    token_ids: list[int]
    log_probs: list[float]
    finish: str = RUNNING
    error: str = ""
    cached: int | None = None
    tops: list[Alternatives] = []  # noqa: RUF012 - never changed
    prompt: list[Alternatives] = []  # noqa: RUF012 - never changed


class KvCacheEvent(NamedTuple):
    """A change of the KV cache.

    KV_STORED and KV_REMOVED have block hashes (llmops_kv_blocks); KV_CLEARED has none.
    """

    kind: int
    names: Sequence[int] = ()


class EngineStats(NamedTuple):
    """Numbers of sequences and KV-cache blocks after a step.

    0 blocks and None mean that a number is not known.

    `scheduled` counts the sequences of the last step, `context` those of them in prefill, and
    `paused` those that the library put back because the cache was full. `memory` is in bytes by
    kind (cpu, gpu, pinned). `ended` has the prompt and generated tokens of each request that ended
    since the last report; the loop fills it in. `prefilled` is the number of prompt tokens that the
    last step computed; without it the loop counts the prompts whose first token arrived.
    """

    active: int = 0
    scheduled: int = 0
    waiting: int = 0
    context: int = 0
    context_tokens: int = 0
    iteration: int = 0
    kv_blocks_max: int = 0
    kv_blocks_used: int = 0
    tokens_per_block: int = 0
    max_requests: int = 0
    kv_blocks_reused: int | None = None
    paused: int = 0
    memory: tuple[tuple[str, int], ...] = ()
    ended: tuple[tuple[int, int], ...] = ()
    prefilled: int | None = None


class EngineState(NamedTuple):
    """The numbers of the tensor `step_state`. STATE_FIELDS of the contract explains each."""

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
    """An error of a library that cannot generate any longer. The message says why."""


class Preparation:
    """Work that must finish before a request can join the batch, such as compiling its grammar.

    The engine thread creates it and counts the requests that wait for it; another thread finishes
    it.
    """

    def __init__(self) -> None:
        self.done = False
        self.rejection = ""
        self.dropped = False
        self._waiting = 0
        self._lock = threading.Lock()

    def add_waiter(self) -> bool:
        """Count one more waiting request. Return False if the preparation was dropped."""
        with self._lock:
            self._waiting += not self.dropped
            return not self.dropped

    def remove_waiter(self) -> None:
        """Count one waiting request less, because it was cancelled."""
        with self._lock:
            self._waiting -= 1

    def drop_if_unwanted(self) -> bool:
        """Drop the preparation if no request waits for it. Return True if it was dropped."""
        with self._lock:
            self.dropped = self._waiting <= 0
            return self.dropped

    def finish(self, rejection: str = "") -> None:
        """Let the waiting requests start, or reject them with a message."""
        self.rejection = rejection
        self.done = True


class EngineRuntime(ABC):
    """A library that generates for many sequences at once.

    Sequences join and leave between two steps.

    The loop sets `wake`, which any thread may call when a preparation is done.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)

    def prepare(self, request: RuntimeRequest) -> Preparation | None:
        """Return the preparation that `submit` has to wait for, or None.

        This request is counted as a waiter of the preparation.

        Raises:
            RequestRejectedError: The library cannot serve the request.
        """
        return None

    @abstractmethod
    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        """Start sequence number `sequence` of `request` under `key`.

        Raises:
            RequestRejectedError: The library cannot serve the request.
        """

    @abstractmethod
    def cancel(self, key: int) -> None:
        """Remove a sequence before the next step. None of its tokens are returned afterwards."""

    @abstractmethod
    def has_work(self) -> bool:
        """Return True if a step would do something."""

    @abstractmethod
    def step(self) -> Iterable[StepOutput]:
        """Advance all sequences by at least one token, and return the new tokens.

        Blocks until they are there.

        Raises:
            DeadEngineError: The library cannot generate any longer.
        """

    def on_idle(self) -> None:
        """Do work that would delay running sequences. Called when nothing runs."""
        return

    def recover(self) -> None:
        """Make the next request possible, after a step failed and every sequence was cancelled."""
        return

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the statistics after the last step."""

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        """Return the changes of the KV cache since the last call, in order.

        The result is empty if the library reports no changes.
        """
        return ()

    def close(self) -> None:
        """Free the resources of the library."""
        return
