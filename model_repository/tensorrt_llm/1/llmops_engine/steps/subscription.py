"""A gateway worker's subscription: one message per engine step with the tokens of all its requests.

docs/contract.md, "Step streams", says what travels. Everything here runs on the engine thread and never waits: what
cannot be sent now is merged into `_pending`, which is bounded by what the requests themselves may generate.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from llmops_contract import (
    ERROR_FLAG,
    FIRST_OF_SLOT,
    HEARTBEAT_INTERVAL,
    LAST_OF_SLOT,
    MAX_UNACKNOWLEDGED_STEPS,
    RECONNECT_GRACE_PERIOD,
    SUBSCRIPTION,
)

from ..engine_runtime import Alternatives, EngineState
from .kv_event_queue import KvEventQueue

# seconds between two questions to Triton whether the stream still lives: each is a round trip between processes on the
# engine thread, and at 0.05 s they were 1.4 % of its time
CANCEL_POLL_INTERVAL = 0.5
# between two messages that only tell a changed state, at least (s)
STATE_INTERVAL = 0.1
# more than this between two looks (s): this process was held up, or a step was long, and what gateways said meanwhile
# has not been read yet
STALL_THRESHOLD = 1.0


@dataclass(slots=True)
class EngineReport:
    """What watchers are told of the engine. `names` UINT64 of KV-cache blocks; `kinds`: kind and count of each run of
    them; `served`: model, version, engine and instance, in the first message and where requests begin."""

    state: EngineState
    names: np.ndarray
    kinds: list[tuple[int, int]]
    served: tuple[str, ...] | None


@dataclass(slots=True)
class StepMessage:
    """`entries` INT32 [n, 4]: slot, sequence, count, flags; `tokens` INT32 and `log_probs` FP32 [sum of counts].

    `tops`: alternatives of each token, empty where none are asked for. `cached`: prompt tokens reused, one per first
    entry, empty where none is known.
    """

    index: int
    entries: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray | None
    errors: list[str]
    cached: list[int]
    tops: list[Alternatives]
    report: EngineReport | None = None


class StepSender(Protocol):
    """The response side of the subscription's own request."""

    def send(self, step: StepMessage) -> None: ...

    def beat(self, state: EngineState) -> None:
        """The state alone, outside of the steps: if it is lost it is not sent again."""

    def finish(self, error: str = "") -> None: ...

    def is_cancelled(self) -> bool: ...


class _Entry:
    __slots__ = ("cached", "error", "flags", "log_probs", "tokens", "tops")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.tops: list[Alternatives] = []
        self.flags = 0
        self.error = ""
        self.cached = -1


class Subscription:
    """`lost` once the gateway is given up on; its requests then leave the batch. `open`: running requests by slot;
    `news`: what it is told of the KV cache, None unless it watches; `demand`: the weights that wait in it.
    """

    def __init__(
        self,
        window: int = MAX_UNACKNOWLEDGED_STEPS,
        grace: float = RECONNECT_GRACE_PERIOD,
        served: tuple[str, ...] | None = None,
    ) -> None:
        self.lost = False
        self.open: dict[int, Any] = {}
        self._next_slot = 0
        self._window = window
        self._grace = grace
        self._sender: StepSender | None = None
        self._unacknowledged: deque[StepMessage] = deque()
        self._pending: dict[tuple[int, int], _Entry] = {}
        self._index = 0
        self._polled = self._heard = 0.0
        self._looked: float | None = None
        self.news: KvEventQueue | None = None
        self.demand = 0
        self._served = served
        self._said = 0.0
        self._state: EngineState | None = None

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
        """Take a slot for a new request. False for one that was taken before: a gateway that lost its stream repeats
        whatever may not have arrived. Slots only grow, so comparing with the highest is enough."""
        if slot < self._next_slot:
            return False
        self._next_slot = slot + 1
        return True

    def acknowledge(self, index: int, now: float) -> None:
        self._heard = now
        while self._unacknowledged and self._unacknowledged[0].index <= index:
            self._unacknowledged.popleft()

    def add(
        self,
        slot: int,
        sequence: int,
        tokens: list[int],
        log_probs: list[float],
        flags: int = 0,
        error: str = "",
        tops: list[Alternatives] | None = None,
    ) -> None:
        """Put tokens or an end into the next step."""
        entry = self._pending.get((slot, sequence))
        if entry is None:
            entry = self._pending[slot, sequence] = _Entry()
        entry.tokens += tokens
        entry.log_probs += log_probs
        if tops:
            entry.tops += tops
        entry.flags |= flags
        entry.error = error or entry.error
        if flags & LAST_OF_SLOT:
            self.open.pop(slot, None)

    def begin(self, slot: int, sequence: int, cached: int | None) -> None:
        """Before a slot's first tokens."""
        entry = self._pending[slot, sequence] = _Entry()
        entry.flags, entry.cached = FIRST_OF_SLOT, -1 if cached is None else cached

    def flush(self, now: float = 0.0, state: EngineState | None = None) -> None:
        """Send what has gathered, if somebody is there and the window is open; `state` for those who watch."""
        if self._sender is None:
            return
        if state is not None:
            state = state._replace(next_slot=self._next_slot)
        news = self.news if self.news else None
        if (self._pending or news is not None) and len(self._unacknowledged) < self._window:
            self._index += 1
            step = _step(self._index, self._pending)
            step.report = self._report(state, step)
            self._pending = {}
            self._unacknowledged.append(step)
            self._sender.send(step)
        elif state is not None and self._has_to_beat(now, state):
            self._sender.beat(state)
        else:
            return
        self._said, self._state = now, state

    def _report(self, state: EngineState | None, step: StepMessage) -> EngineReport | None:
        if self.news is None or state is None:
            return None
        names, kinds = self.news.take() if self.news else (np.zeros(0, np.uint64), [])
        begun = bool((step.entries[:, 3] & FIRST_OF_SLOT).any())
        return EngineReport(state, names, kinds, self._served if begun or step.index == 1 else None)

    def _has_to_beat(self, now: float, state: EngineState) -> bool:
        if self.news is None:
            return False
        changed = self._state is None or _load(state) != _load(self._state)
        return now - self._said >= (STATE_INTERVAL if changed else HEARTBEAT_INTERVAL)

    def check(self, now: float) -> None:
        """Notice a broken stream, and give up on a gateway that was away or silent for the grace time."""
        if self._sender is not None and now - self._polled >= CANCEL_POLL_INTERVAL:
            self._polled = now
            if self._sender.is_cancelled():
                self.detach(now)
        if self._looked is not None and now - self._looked > STALL_THRESHOLD:
            self._heard = min(self._heard + now - self._looked - STALL_THRESHOLD, now)
        self._looked = now
        waiting = self._sender is None or len(self._unacknowledged) >= self._window
        if waiting and now - self._heard > self._grace:
            self.close(f"{SUBSCRIPTION}: dropped, because nothing was acknowledged within the grace time")

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


def _load(state: EngineState) -> tuple[int, ...]:
    """What makes a state worth telling: the rest changes as time passes."""
    return (state.running, state.waiting, state.subscribers, state.demand, state.draining)


def _step(index: int, pending: dict[tuple[int, int], _Entry]) -> StepMessage:
    rows, tokens, log_probs, errors, cached = [], [], [], [], []
    tops: list[Alternatives] = []
    ranked = any(entry.tops for entry in pending.values())
    scored = any(entry.log_probs for entry in pending.values())
    for (slot, sequence), entry in pending.items():
        rows.append((slot, sequence, len(entry.tokens), entry.flags))
        tokens += entry.tokens
        if scored:
            log_probs += entry.log_probs or [0.0] * len(entry.tokens)
        if ranked:
            tops += entry.tops or [[]] * len(entry.tokens)
        if entry.flags & ERROR_FLAG:
            errors.append(entry.error)
        if entry.flags & FIRST_OF_SLOT:
            cached.append(entry.cached)
    return StepMessage(
        index,
        np.array(rows, np.int32).reshape(-1, 4),
        np.array(tokens, np.int32),
        np.array(log_probs, np.float32) if scored else None,
        errors,
        cached if max(cached, default=-1) >= 0 else [],
        tops,
    )
