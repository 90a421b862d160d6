"""A gateway worker's subscription: one message per engine step with the tokens of all its requests.

docs/contract.md, "Step streams", says what travels. Everything here runs on the engine thread and never waits: what
cannot be sent now is merged into `_pending`, which is bounded by what the requests themselves may generate.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from llmops_contract import ERROR, GRACE, LAST_OF_SLOT, SUBSCRIPTION, WINDOW

# seconds between two questions to Triton whether the stream still lives: each is a round trip between processes on the
# engine thread, and at 0.05 s they were 1.4 % of its time
POLL = 0.5


@dataclass(slots=True)
class Step:
    """`entries` INT32 [n, 4]: slot, sequence, count, flags; `tokens` INT32 and `log_probs` FP32 [sum of counts]."""

    index: int
    entries: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray | None
    errors: list[str]


class StepSender(Protocol):
    """The response side of the subscription's own request."""

    def send(self, step: Step) -> None: ...

    def finish(self, error: str = "") -> None: ...

    def is_cancelled(self) -> bool: ...


class _Entry:
    __slots__ = ("error", "flags", "log_probs", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.flags = 0
        self.error = ""


class Subscription:
    """`lost` once the gateway is given up on; its requests then leave the batch. `open`: running requests by slot."""

    def __init__(self, window: int = WINDOW, grace: float = GRACE) -> None:
        self.lost = False
        self.open: dict[int, Any] = {}
        self._highest_slot = -1
        self._window = window
        self._grace = grace
        self._sender: StepSender | None = None
        self._unacknowledged: deque[Step] = deque()
        self._pending: dict[tuple[int, int], _Entry] = {}
        self._index = 0
        self._polled = self._heard = 0.0

    @property
    def settled(self) -> bool:
        """Nothing is left to be sent, nor to be sent again to a gateway whose stream broke."""
        return not self._pending and (self._sender is not None or not self._unacknowledged)

    def attach(self, sender: StepSender, resume_from: int, now: float) -> bool:
        """Continue on a new stream after step `resume_from`. False when steps after it are gone."""
        if not self._index - len(self._unacknowledged) <= resume_from <= self._index:
            return False
        if self._sender is not None:
            self._sender.finish()
        self._sender = sender
        self.acknowledge(resume_from, now)
        for step in self._unacknowledged:
            sender.send(step)
        return True

    def claim(self, slot: int) -> bool:
        """Take a slot for a new request. False for one that was taken before: a gateway that lost its stream says again
        what it cannot know to have arrived. Slots only grow, so the highest one tells."""
        if slot <= self._highest_slot:
            return False
        self._highest_slot = slot
        return True

    def acknowledge(self, index: int, now: float) -> None:
        self._heard = now
        while self._unacknowledged and self._unacknowledged[0].index <= index:
            self._unacknowledged.popleft()

    def add(
        self, slot: int, sequence: int, tokens: list[int], log_probs: list[float], flags: int = 0, error: str = ""
    ) -> None:
        """Put tokens or an end into the next step."""
        entry = self._pending.get((slot, sequence))
        if entry is None:
            entry = self._pending[slot, sequence] = _Entry()
        entry.tokens += tokens
        entry.log_probs += log_probs
        entry.flags |= flags
        entry.error = error or entry.error
        if flags & LAST_OF_SLOT:
            self.open.pop(slot, None)

    def flush(self) -> None:
        """Send what has gathered, if somebody is there and the window is open."""
        if self._pending and self._sender is not None and len(self._unacknowledged) < self._window:
            self._index += 1
            step = _step(self._index, self._pending)
            self._pending = {}
            self._unacknowledged.append(step)
            self._sender.send(step)

    def check(self, now: float) -> None:
        """Notice a broken stream, and give up on a gateway that was away or silent for the grace time."""
        if self._sender is not None and now - self._polled >= POLL:
            self._polled = now
            if self._sender.is_cancelled():
                self.detach(now)
        waiting = self._sender is None or len(self._unacknowledged) >= self._window
        if waiting and now - self._heard > self._grace:
            self.close(f"{SUBSCRIPTION}: dropped, because nothing was acknowledged for the grace time")

    def detach(self, now: float) -> None:
        if self._sender is not None:
            self._sender.finish()
            self._sender = None
            self._heard = now

    def close(self, error: str = "") -> None:
        """End the stream permanently."""
        self.lost = True
        if self._sender is not None:
            self._sender.finish(error)
            self._sender = None


def _step(index: int, pending: dict[tuple[int, int], _Entry]) -> Step:
    rows, tokens, log_probs, errors = [], [], [], []
    scored = any(entry.log_probs for entry in pending.values())
    for (slot, sequence), entry in pending.items():
        rows.append((slot, sequence, len(entry.tokens), entry.flags))
        tokens += entry.tokens
        if scored:
            log_probs += entry.log_probs or [0.0] * len(entry.tokens)
        if entry.flags & ERROR:
            errors.append(entry.error)
    return Step(
        index,
        np.array(rows, np.int32),
        np.array(tokens, np.int32),
        np.array(log_probs, np.float32) if scored else None,
        errors,
    )
