"""What the engine model needs of a library that generates: `EngineRuntime`, one implementation per library.

A runtime is driven by one thread (`loop.py`) and need not be thread-safe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from .request import GenerationRequest

RUNNING, STOP, LENGTH, CANCELLED, FAILED = "", "stop", "length", "cancelled", "failed"


class StepOutput(NamedTuple):
    """What one step added to one sequence. `log_probs` is empty unless asked for.

    `finish`: RUNNING while more follows, else why it ended; with FAILED, `error` says what happened.
    """

    key: int
    token_ids: list[int]
    log_probs: list[float]
    finish: str = RUNNING
    error: str = ""


class EngineStats(NamedTuple):
    """Sequences and KV-cache blocks after a step. `scheduled`: in the last step; `context`: of these, in prefill."""

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


class EngineRuntime(ABC):
    """Generates for many sequences at once; a sequence may join and leave between any two steps."""

    @abstractmethod
    def submit(self, key: int, request: GenerationRequest, sequence: int) -> None:
        """Start sequence number `sequence` of `request` under `key`. Raises Refused."""

    @abstractmethod
    def cancel(self, key: int) -> None:
        """Take a sequence out before the next step; nothing of it is returned any more."""

    @abstractmethod
    def has_work(self) -> bool: ...

    @abstractmethod
    def step(self) -> Iterable[StepOutput]:
        """Advance all sequences by (at least) one token and return what is new; blocks meanwhile."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Free what the library holds."""
        return
