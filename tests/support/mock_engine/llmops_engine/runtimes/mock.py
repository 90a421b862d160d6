"""An EngineRuntime without an engine: every sequence gets one token at each tick of a clock. Runs inside Triton."""

import time
from collections.abc import Iterable, Iterator

import llmops_contract as contract

from ..engine_runtime import LENGTH, RUNNING, STOP, DeadEngineError, EngineRuntime, EngineStats, StepOutput
from ..request import RequestRejectedError, RuntimeRequest
from .faults import FaultFile
from .script import Script
from .stop_words import StopWordMatcher


class Sequence:
    """A running sequence with at most `left` tokens of `answer` to come.

    It has a matcher only if there are stop words.
    """

    __slots__ = ("answer", "left", "matcher", "min_left")

    def __init__(self, answer: Iterator[int], request: RuntimeRequest, words: list[list[int]]) -> None:
        self.answer = answer
        self.left, self.min_left = request.max_new_tokens, request.min_tokens
        self.matcher = StopWordMatcher(words) if words else None

    def ended_by(self, token: int) -> str:
        self.left -= 1
        self.min_left -= 1
        finish: str = RUNNING if self.left else LENGTH
        if self.matcher is not None and self.matcher.find([token]) is not None and self.min_left <= 0:
            finish = STOP
        return finish


class MockRuntime(EngineRuntime):
    """`period`: seconds between two ticks. `first`: a sequence's first token comes at the next multiple of this many
    seconds instead, so that time to first token does not drown in waiting for a tick.
    """

    def __init__(self, period: float, first: float, script: Script, max_requests: int, faults: FaultFile) -> None:
        self._period, self._first = period, first
        self._script = script
        self._known = frozenset(script.token_ids)
        self._max_requests = max_requests
        self._faults = faults
        self._sequences: dict[int, Sequence] = {}
        self._new: set[int] = set()
        self._iteration = 0
        self._start = time.monotonic()

    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        if self._faults.now().refuse:
            raise RequestRejectedError(f"{contract.QUEUE_FULL_PREFIX}: told to refuse")
        refuse_what_chooses(request)
        words = [[token] for token in request.end_ids] + [word for word in request.stop_words if word]
        possible = [word for word in words if self._known.issuperset(word)]
        self._sequences[key] = Sequence(self._script.after(request.input_ids.tolist()), request, possible)
        self._new.add(key)

    def cancel(self, key: int) -> None:
        self._sequences.pop(key, None)
        self._new.discard(key)

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> Iterable[StepOutput]:
        faults = self._faults.now()
        if faults.die:
            raise DeadEngineError("told to die")
        now = time.monotonic() - self._start
        tick = faults.slow * (self._first or self._period)
        time.sleep(tick - now % tick)
        if faults.stall:
            return []
        period = faults.slow * self._period
        beat = int((now + tick) / period) > int(now / period)
        keys = list(self._sequences) if beat else list(self._new)
        self._new.clear()
        self._iteration += beat
        return [self._advance(key) for key in keys]

    def _advance(self, key: int) -> StepOutput:
        sequence = self._sequences[key]
        token = next(sequence.answer)
        finish = sequence.ended_by(token)
        if finish:
            del self._sequences[key]
        return StepOutput(key, [token], [], finish)

    def stats(self) -> EngineStats:
        active = len(self._sequences)
        # a block for each sequence: a gauge that never moves is one that has stopped
        return EngineStats(active, active, 0, 0, 0, self._iteration, 1024, active, 32, self._max_requests)


def refuse_what_chooses(request: RuntimeRequest) -> None:
    """Its tokens are fixed, so nothing that would choose others can be honoured."""
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
            raise RequestRejectedError(f"{tensor}: not supported by the mock engine")
