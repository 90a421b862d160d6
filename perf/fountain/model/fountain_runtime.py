"""An EngineRuntime without an engine: every sequence gets one token at each beat of a clock. Runs inside Triton."""

from __future__ import annotations

import time
from collections.abc import Iterable

from .request import GenerationRequest
from .runtime import LENGTH, RUNNING, EngineRuntime, EngineStats, StepOutput


class _Sequence:
    __slots__ = ("left", "position")

    def __init__(self, left: int) -> None:
        self.left = left
        self.position = 0


class FountainRuntime(EngineRuntime):
    """`period`: seconds between two beats. `first`: a sequence's first token comes at the next multiple of this many
    seconds instead, so that time to first token is not lost in waiting for a beat. Tokens cycle through `token_ids`.
    """

    def __init__(self, period: float, first: float, token_ids: list[int], max_requests: int) -> None:
        self._period, self._first = period, first
        self._token_ids = token_ids
        self._max_requests = max_requests
        self._sequences: dict[int, _Sequence] = {}
        self._new: set[int] = set()
        self._iteration = 0
        self._start = time.monotonic()

    def submit(self, key: int, request: GenerationRequest, sequence: int) -> None:
        self._sequences[key] = _Sequence(request.max_new_tokens)
        self._new.add(key)

    def cancel(self, key: int) -> None:
        self._sequences.pop(key, None)
        self._new.discard(key)

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> Iterable[StepOutput]:
        now = time.monotonic() - self._start
        tick = self._first or self._period
        time.sleep(tick - now % tick)
        beat = int((now + tick) / self._period) > int(now / self._period)
        keys = list(self._sequences) if beat else list(self._new)
        self._new.clear()
        self._iteration += beat
        return [self._advance(key) for key in keys]

    def _advance(self, key: int) -> StepOutput:
        sequence = self._sequences[key]
        token = self._token_ids[sequence.position % len(self._token_ids)]
        sequence.position += 1
        sequence.left -= 1
        if sequence.left:
            return StepOutput(key, [token], [], RUNNING)
        del self._sequences[key]
        return StepOutput(key, [token], [], LENGTH)

    def stats(self) -> EngineStats:
        active = len(self._sequences)
        return EngineStats(active, active, 0, 0, 0, self._iteration, 1024, 0, 32, self._max_requests)
