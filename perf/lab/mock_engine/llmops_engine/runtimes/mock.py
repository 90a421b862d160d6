"""An EngineRuntime without an engine: every sequence gets one token at each beat of a clock. Runs inside Triton."""

from __future__ import annotations

import time
from collections.abc import Iterable

import llmops_contract as contract

from ..request import GenerationRequest, Refused
from ..runtime import LENGTH, RUNNING, STOP, EngineRuntime, EngineStats, StepOutput
from .stop_words import StopWordMatcher


class _Sequence:
    """`finish` is why it ends once `left` tokens have come."""

    __slots__ = ("finish", "left", "position")

    def __init__(self, left: int, finish: str) -> None:
        self.left, self.finish = left, finish
        self.position = 0


class MockRuntime(EngineRuntime):
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
        _refuse(request)
        stop = self._stop_at(request)
        most = request.max_new_tokens
        self._sequences[key] = _Sequence(most, LENGTH) if stop is None or stop > most else _Sequence(stop, STOP)
        self._new.add(key)

    def _stop_at(self, request: GenerationRequest) -> int | None:
        """How many tokens there are when an end id or a stop word is complete: what comes is known beforehand."""
        words = [[token] for token in request.end_ids] + [word for word in request.stop_words if word]
        if not any(set(word) <= set(self._token_ids) for word in words):
            return None
        matcher = StopWordMatcher(words)
        longest = max(map(len, words))
        for position in range(request.min_tokens + len(self._token_ids) + longest):
            found = matcher.find([self._token_ids[position % len(self._token_ids)]])
            if found is not None and position + 1 >= max(1, request.min_tokens):
                return position + 1
        return None

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
        return StepOutput(key, [token], [], sequence.finish)

    def stats(self) -> EngineStats:
        active = len(self._sequences)
        return EngineStats(active, active, 0, 0, 0, self._iteration, 1024, 0, 32, self._max_requests)


def _refuse(request: GenerationRequest) -> None:
    """Its tokens are fixed: what would choose others cannot be honoured."""
    sampling = request.sampling
    asked = {
        contract.RETURN_LOG_PROBS: request.log_probs,
        contract.REPETITION_PENALTY: sampling.repetition_penalty != 1,
        contract.PRESENCE_PENALTY: sampling.presence_penalty != 0,
        contract.FREQUENCY_PENALTY: sampling.frequency_penalty != 0,
        contract.RUNTIME_MIN_P: sampling.min_p != 0,
    }
    for tensor, given in asked.items():
        if given:
            raise Refused(f"{tensor}: not supported by the mock engine")
