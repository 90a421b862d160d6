"""The subscription of a gateway worker to an engine's steps.

The worker receives one message per engine step, with the tokens of all its requests.

docs/contract.md, "Step streams", describes the messages. All of this code runs on the engine thread
and never waits. Entries that cannot be sent now are merged into `_pending`, whose size is bounded
by the number of tokens that the requests may generate.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .sinks import TritonStepSender

#: Seconds between two checks with Triton for a broken stream. Each check is a round trip to
#: Triton's process on the engine thread: an interval of 0.05 s took 1.4 % of the thread's time.
CANCEL_POLL_INTERVAL = 0.5
#: Minimum seconds between two messages that have no tokens, but a changed state or changes of the
#: cache. Gateways route requests by both.
STATE_INTERVAL = 0.1
#: Seconds between two checks above which the engine thread was held up, so that acknowledgements of
#: gateways may still be unread. The excess does not count towards the grace period.
STALL_THRESHOLD = 1.0


@dataclass(slots=True)
class EngineReport:
    """The engine's state, for a gateway that watches the engine.

    `kv_hashes` are UINT64 hashes of KV-cache blocks. `kv_kinds` has the kind of event and the
    number of hashes for each run of hashes with the same kind. `identity` has the model, its
    version, the engine and the instance. `identity` is sent with the first message and with the
    first tokens of requests, and is None in other messages.
    """

    state: EngineState
    kv_hashes: np.ndarray
    kv_kinds: list[tuple[int, int]]
    identity: tuple[str, ...] | None


@dataclass(slots=True)
class StepMessage:
    """One message of a step stream.

    `entries` is INT32 [n, 4] with slot, sequence, token count and flags. `tokens` is INT32 and
    `log_probs` FP32; the length of both is the sum of the counts. `tops` has the alternatives of
    each token, followed by the alternatives of prompt tokens; it is empty if no request asks for
    alternatives. `cached` has, for the first entry of each request, the number of reused prompt
    tokens; it is empty if no number is known. `prompt_lengths` has, for the first entry of each
    request, the number of elements of `tops` that belong to its prompt; it is empty if no request
    asks for them.
    """

    index: int
    entries: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray | None
    errors: list[str]
    cached: list[int]
    tops: list[Alternatives]
    prompt_lengths: list[int]
    report: EngineReport | None = None


class _Entry:
    """The tokens of one sequence that are to be sent with the next step."""

    __slots__ = ("cached", "error", "flags", "log_probs", "prompt", "tokens", "tops")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.tops: list[Alternatives] = []
        self.prompt: list[Alternatives] = []
        self.flags = 0
        self.error = ""
        self.cached = -1


class Subscription:
    """The step stream of one gateway worker.

    Attributes:
        lost: True once the engine has given up on the gateway. The gateway's requests then leave
            the batch.
        open: The gateway's running requests, by slot.
        kv_events: The KV-cache events that are to be sent, or None if the gateway does not watch
            the engine.
        demand: The sum of the weights of the requests that wait in the gateway.
    """

    def __init__(
        self,
        window: int = MAX_UNACKNOWLEDGED_STEPS,
        grace: float = RECONNECT_GRACE_PERIOD,
        identity: tuple[str, ...] | None = None,
    ) -> None:
        """Create a subscription without a stream.

        Args:
            window: Maximum number of sent steps that the gateway has not acknowledged.
            grace: Seconds that the subscription is kept after its stream broke or its gateway fell
                silent.
            identity: The model, its version, the engine and the instance, for gateways that watch
                the engine.
        """
        self.lost = False
        self.open: dict[int, Any] = {}
        self.kv_events: KvEventQueue | None = None
        self.demand = 0
        self._window = window
        self._grace = grace
        self._identity = identity
        self._sender: TritonStepSender | None = None
        self._next_slot = 0
        self._index = 0
        self._pending: dict[tuple[int, int], _Entry] = {}
        self._unacknowledged: deque[StepMessage] = deque()
        self._last_state: EngineState | None = None
        # Values of time.monotonic() at the last poll for cancellation, acknowledgement, check and
        # message.
        self._polled_at = self._acknowledged_at = 0.0
        self._sent_at = -math.inf
        self._checked_at: float | None = None

    @property
    def is_settled(self) -> bool:
        """Return True if nothing is left to send, and nothing to repeat after the stream broke."""
        return not self._pending and (self._sender is not None or not self._unacknowledged)

    def attach(self, sender: TritonStepSender, resume_from: int, now: float) -> bool:
        """Continue on a new stream after step `resume_from`.

        Return False if the steps after `resume_from` are no longer stored.
        """
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
        """Take a slot for a new request. Return False if the slot was taken before.

        A gateway that lost its stream repeats every submission that may not have arrived. A gateway
        only uses ascending slots, so a comparison with the highest slot is enough.
        """
        if slot < self._next_slot:
            return False
        self._next_slot = slot + 1
        return True

    def acknowledge(self, index: int, now: float) -> None:
        """Forget the steps up to `index`, which the gateway has received."""
        self._acknowledged_at = now
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
        """Add tokens or the end of a sequence to the next step.

        Args:
            slot: The slot of the request.
            sequence: The index of the sequence in the request.
            tokens: The new token ids.
            log_probs: The log-probability of each token, or no values.
            flags: The bit flags of the entry, from the contract.
            error: The error that ended the request, or an empty text.
            tops: The most likely tokens in place of each token, if the request asks for them.
        """
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

    def begin(self, slot: int, sequence: int, cached: int | None, prompt: list[Alternatives]) -> None:
        """Start the entry of a slot's first tokens.

        `cached` is the number of prompt tokens that were cached, and `prompt` has the alternatives
        of the prompt's tokens, if the request asks for them.
        """
        entry = self._pending[slot, sequence] = _Entry()
        entry.prompt = prompt
        entry.flags, entry.cached = FIRST_OF_SLOT, -1 if cached is None else cached

    def flush(self, now: float = 0.0, state: EngineState | None = None) -> None:
        """Send the pending entries if there is a stream and the window is open.

        Args:
            now: The current value of `time.monotonic()`, in seconds.
            state: The engine's state, for gateways that watch it.
        """
        if self._sender is None:
            return
        if state is not None:
            state = state._replace(next_slot=self._next_slot)
        # a gateway without requests here receives changes of the cache every STATE_INTERVAL, not
        # each step
        is_due = self._pending or (self.kv_events and now - self._sent_at >= STATE_INTERVAL)
        if is_due and len(self._unacknowledged) < self._window:
            self._index += 1
            step = _step_message(self._index, self._pending)
            step.report = self._report(state, step)
            self._pending = {}
            self._unacknowledged.append(step)
            self._sender.send(step)
        elif state is not None and self._heartbeat_due(now, state):
            self._sender.send_heartbeat(state)
        else:
            return
        self._sent_at, self._last_state = now, state

    def _report(self, state: EngineState | None, step: StepMessage) -> EngineReport | None:
        if self.kv_events is None or state is None:
            return None
        hashes, kinds = self.kv_events.take() if self.kv_events else (np.zeros(0, np.uint64), [])
        with_identity = step.index == 1 or bool((step.entries[:, 3] & FIRST_OF_SLOT).any())
        return EngineReport(state, hashes, kinds, self._identity if with_identity else None)

    def _heartbeat_due(self, now: float, state: EngineState) -> bool:
        if self.kv_events is None:
            return False
        changed = self._last_state is None or _load(state) != _load(self._last_state)
        return now - self._sent_at >= (STATE_INTERVAL if changed else HEARTBEAT_INTERVAL)

    def check(self, now: float) -> None:
        """Detect a broken stream, and give up on a gateway that has disappeared.

        A gateway has disappeared if it had no stream, or acknowledged nothing, for the grace
        period.
        """
        if self._sender is not None and now - self._polled_at >= CANCEL_POLL_INTERVAL:
            self._polled_at = now
            if self._sender.is_cancelled():
                self.detach(now)
        if self._checked_at is not None and now - self._checked_at > STALL_THRESHOLD:
            stalled = now - self._checked_at - STALL_THRESHOLD
            self._acknowledged_at = min(self._acknowledged_at + stalled, now)
        self._checked_at = now
        waiting = self._sender is None or len(self._unacknowledged) >= self._window
        if waiting and now - self._acknowledged_at > self._grace:
            self.close(f"{SUBSCRIPTION}: dropped, because the gateway acknowledged no step within the grace period")

    def detach(self, now: float) -> None:
        """End the stream. The gateway may attach another one within the grace period."""
        if self._sender is not None:
            self._sender.finish()
            self._sender = None
            self._acknowledged_at = now

    def close(self, error: str = "") -> None:
        """End the stream permanently."""
        self.lost = True
        if self._sender is not None:
            self._sender.finish(error)
            self._sender = None


def _load(state: EngineState) -> tuple[int, ...]:
    """Return the numbers of a state whose change is sent after STATE_INTERVAL.

    The other numbers of a state change all the time, so their changes wait for the next message.
    """
    return (state.running, state.waiting, state.subscribers, state.demand, state.draining)


def _step_message(index: int, pending: dict[tuple[int, int], _Entry]) -> StepMessage:
    rows, tokens, log_probs, errors, cached = [], [], [], [], []
    tops: list[Alternatives] = []
    prompts = [entry.prompt for entry in pending.values() if entry.flags & FIRST_OF_SLOT]
    has_prompts = any(prompts)
    has_tops = has_prompts or any(entry.tops for entry in pending.values())
    has_log_probs = any(entry.log_probs for entry in pending.values())
    for (slot, sequence), entry in pending.items():
        rows.append((slot, sequence, len(entry.tokens), entry.flags))
        tokens += entry.tokens
        if has_log_probs:
            log_probs += entry.log_probs or [0.0] * len(entry.tokens)
        if has_tops:
            tops += entry.tops or [[]] * len(entry.tokens)
        if entry.flags & ERROR_FLAG:
            errors.append(entry.error)
        if entry.flags & FIRST_OF_SLOT:
            cached.append(entry.cached)
    return StepMessage(
        index=index,
        entries=np.array(rows, np.int32).reshape(-1, 4),
        tokens=np.array(tokens, np.int32),
        log_probs=np.array(log_probs, np.float32) if has_log_probs else None,
        errors=errors,
        cached=cached if max(cached, default=-1) >= 0 else [],
        tops=tops + [place for prompt in prompts for place in prompt] if has_prompts else tops,
        prompt_lengths=[len(prompt) for prompt in prompts] if has_prompts else [],
    )
