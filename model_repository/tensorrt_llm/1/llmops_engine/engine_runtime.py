"""The interface between the engine model and a library that generates: `EngineRuntime`.

Each library has one implementation in `runtimes/`. One thread (`loop.py`) drives a runtime, so a
runtime need not be thread-safe.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .request import RuntimeRequest

#: Values of `StepOutput.finish`: the reason why a sequence ended, or RUNNING while it continues.
RUNNING, STOP, LENGTH, FAILED = "", "stop", "length", "failed"
#: Prefix of errors that the request did not cause. Such a request may succeed on another replica.
ENGINE_FAILED = "the engine failed"

#: The most likely tokens at one position: pairs of token id and log-probability, likeliest first.
Alternatives = list[tuple[int, float]]


class StepOutput(NamedTuple):
    """The tokens that one step added to one sequence.

    `log_probs` and `tops` are empty unless the request asks for them. `finish` is RUNNING or the
    reason why the sequence ended; `error` explains FAILED. `cached` comes with the first tokens:
    the number of prompt tokens that were in the KV cache, or None if the library does not report
    it. `prompt` also comes with the first tokens, if the request asks for it: for each prompt token
    after the first, the tokens that the model found most likely in its place.
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

    `kind` is KV_STORED, KV_REMOVED or KV_CLEARED. `names` are the hashes of the stored or removed
    blocks (llmops_kv_blocks), and empty for KV_CLEARED.
    """

    kind: int
    names: Sequence[int] = ()


class EngineStats(NamedTuple):
    """The numbers of sequences and KV-cache blocks after a step.

    0 blocks and None mean that a number is not known.

    `scheduled` counts the sequences of the last step, `context` the scheduled sequences in prefill,
    and `paused` the sequences that the library put back because the cache was full. `memory` is in
    bytes by kind (cpu, gpu, pinned). `ended` has the prompt and generated tokens of each request
    that ended since the last report; the loop fills it in. `prefilled` is the number of prompt
    tokens that the last step computed; without it the loop counts the prompts whose first token
    arrived.
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
    """The numbers of the tensor `step_state`, which the contract's STATE_FIELDS explains."""

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
    """An error of a library that cannot generate any longer. The message gives the cause."""


class Preparation:
    """Work that must finish before a request can join the batch, such as compiling its grammar.

    The engine thread creates a preparation and counts the requests that wait for it. Another thread
    calls `finish`.
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
        """Decrease the count of waiting requests by one, because a request was cancelled."""
        with self._lock:
            self._waiting -= 1

    def drop_if_unwanted(self) -> bool:
        """Drop the preparation if no request waits for it. Return True if it was dropped."""
        with self._lock:
            self.dropped = self._waiting <= 0
            return self.dropped

    def finish(self, rejection: str = "") -> None:
        """Let the waiting requests start, or reject them with a non-empty `rejection`."""
        self.rejection = rejection
        self.done = True


class EngineRuntime(ABC):
    """A library that generates for many sequences at once.

    Sequences join and leave between two steps.

    The engine loop sets `wake`. Any thread may call `wake` when a preparation is done.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)

    def prepare(self, request: RuntimeRequest) -> Preparation | None:
        """Return the preparation that `submit` has to wait for, or None.

        The request is counted as a waiter of the preparation.

        Raises:
            RequestRejectedError: The library cannot serve the request.
        """
        return None

    @abstractmethod
    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        """Start the sequence with index `sequence` of `request`, whose StepOutputs carry `key`.

        Raises:
            RequestRejectedError: The library cannot serve the request.
        """

    @abstractmethod
    def cancel(self, key: int) -> None:
        """Remove a sequence before the next step. Later steps return no tokens of the sequence."""

    @abstractmethod
    def has_work(self) -> bool:
        """Return True if a call of `step` would have work to do."""

    @abstractmethod
    def step(self) -> Iterable[StepOutput]:
        """Advance all sequences by at least one token, and return the new tokens.

        Blocks until there is a new token.

        Raises:
            DeadEngineError: The library cannot generate any longer.
        """

    def on_idle(self) -> None:
        """Do work that would delay running sequences. Called while no sequence runs."""
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
