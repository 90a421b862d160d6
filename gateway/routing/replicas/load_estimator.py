"""The state of a replica that does not report one, estimated from this gateway's own streams.

NVIDIA's C++ backend sends no step messages. What a gateway can see is when it sent a request, when tokens arrive, and
twice a second the server's gauges. From this it derives the fields of a `ReplicaView`. Pure: the caller brings the
time, so the simulator runs this code unchanged.

A decoding sequence gets one token per step. So a step has ended when a sequence gets its second token since the last
step ended. A request without a first token is still to be read.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from llmops.gateway.interfaces import ReplicaView
from llmops.gateway.routing.replicas.in_flight import InFlightRequest, InFlightTracker
from llmops.gateway.routing.replicas.step_time_model import OBSERVATION_WINDOW, FittedStepTimeModel

#: Steps without a prompt that make one observation: few enough for a batch to stay as it is.
DECODE_STEPS_PER_OBSERVATION = 8
#: Steps after which a group is dropped in which a prompt waits and none is finished.
MAX_STEPS_PER_OBSERVATION = 512
#: Share of the newest step in the mean of prompt tokens per step, as `Replica` has it for reported steps.
PROMPT_TOKENS_SMOOTHING = 0.1
#: Share of the decoding sequences that must have a token of a step before the next step can begin. Tokens that
#: one slow reader finds at once are no steps.
STEP_MAJORITY = 0.5

#: Seconds after the end of a step in which a request that is sent still takes part in the next step.
SAME_STEP_TOLERANCE = 1e-4

#: Weight of the newest gauges in the mean by which they exceed this gateway's requests.
GAUGE_SMOOTHING = 0.5
#: Seconds for which the last gauges say what other gateways have sent, while no new ones can be read.
GAUGES_MAX_AGE = 2.0


class EngineGauges(NamedTuple):
    """The gauges of an engine model, as `nv_trt_llm_*` has them.

    Attributes:
        active: Requests that it has, those that wait included.
        waiting: Those of them whose prompt is still to be read.
        iterations: Steps so far.
        blocks: Blocks of the KV cache, of which `free_blocks` are free; 0 where the engine does not say.
        tokens_per_block: Tokens in each of them.
    """

    active: int = 0
    waiting: int = 0
    iterations: float = 0.0
    blocks: int = 0
    free_blocks: int = 0
    tokens_per_block: int = 0


class _StepTotals:
    """A step, or several together: what was done in it, as sums over the steps."""

    __slots__ = ("batches", "contexts", "count", "prompt_tokens", "reading", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.batches = self.contexts = self.prompt_tokens = self.seconds = self.reading = 0.0

    def add(self, other: _StepTotals) -> None:
        self.count += other.count
        self.batches += other.batches
        self.contexts += other.contexts
        self.prompt_tokens += other.prompt_tokens
        self.seconds += other.seconds
        self.reading += other.reading


class LoadEstimator:
    """An estimate of one replica's state, kept in its view.

    `unseen` in the view are the requests without a first token, `running` the others; both and `waiting` include
    those of other gateways as far as the gauges show them.
    """

    def __init__(self, view: ReplicaView, unseen: InFlightTracker) -> None:
        view.source = "measured"
        self._view, self._unseen = view, unseen
        self._model = FittedStepTimeModel()
        # tokens/s of the last prompts that were read, and their tokens
        self._rates: deque[tuple[float, float]] = deque(maxlen=OBSERVATION_WINDOW)
        self._next_rate = 1
        # own sequences that decode, the tokens that these have in the cache, those of them that were cached before, and
        # own requests of any state
        self._decoding = self._context = self._shared = self._open = 0
        # the number of the step under way, when the last one ended, and who has a token since
        self._number, self._ended, self._came = 0, 0.0, 0
        # first tokens since the last step ended: when, and how many prompt tokens were read for it
        self._firsts: list[tuple[float, int]] = []
        # requests without a first token when the last step ended: the next step can read no others
        self._waited = 0
        # the last step, to which first tokens that arrive late may still belong, and the group that it will be part of
        self._last, self._group = _StepTotals(), _StepTotals()
        self._reads = 0.0
        # sequences of other gateways that decode, and the mean of uncached tokens in this gateway's prompts
        self._others, self._prompt = 0, 0.0
        # by how much the gauges exceed own requests, and own ones without a first token
        self._beyond = self._beyond_waiting = 0.0
        # the last gauges, when they were read, and the tokens that own
        # sequences had added to the cache then
        self._gauges, self._read_at, self._held = EngineGauges(), 0.0, 0

    def sent(self, sent: InFlightRequest, now: float) -> None:
        """A request leaves for the replica."""
        sent.at, sent.step = now, -1
        self._open += 1
        # what leaves as soon as a step ends is there when the next one begins
        self._waited += now - self._ended < SAME_STEP_TOLERANCE

    def token(self, sent: InFlightRequest, count: int, now: float) -> bool:
        """Take a message of a request with `count` tokens. Returns True if it is the first one."""
        first = sent.step < 0
        if first:
            self._first(sent, now)
        elif sent.step == self._number and self._came >= STEP_MAJORITY * self._decoding:
            self._end_step(now)
        if sent.step != self._number:
            sent.step = self._number
            self._came += 1
        sent.made += count
        self._context += count
        return first

    def ended(self, sent: InFlightRequest) -> None:
        """A request is over, or goes on elsewhere."""
        self._open -= 1
        if sent.step >= 0:
            self._decoding -= 1
            self._context -= sent.prompt + sent.made
            self._shared -= sent.prompt - sent.tokens
            self._tell()
        if not self._decoding:
            self._idle()

    def gauges(self, gauges: EngineGauges, now: float) -> None:
        """Take the server's gauges: what exceeds this gateway's own requests belongs to other gateways.

        Gauges are a little older than this gateway's own counts, so what they differ by is taken over several of them.
        """
        view, before = self._view, self._gauges
        self._beyond += GAUGE_SMOOTHING * (gauges.active - self._open - self._beyond)
        self._beyond_waiting += GAUGE_SMOOTHING * (gauges.waiting - len(self._unseen) - self._beyond_waiting)
        others = max(round(self._beyond), 0)
        view.waiting = min(max(round(self._beyond_waiting), 0), others)
        self._others = others - view.waiting
        # prompts of the size that this gateway's own have
        view.waiting_tokens = round(view.waiting * self._prompt)
        if not self._decoding and before.active and gauges.active and gauges.iterations > before.iterations:
            # only the others' steps are there to be counted
            view.step_seconds = (now - self._read_at) / (gauges.iterations - before.iterations)
        self._gauges, self._read_at = gauges, now
        if gauges.blocks:
            view.blocks, view.tokens_per_block = gauges.blocks, gauges.tokens_per_block or view.tokens_per_block
            self._held = self._context - self._shared
        self._tell()

    def no_gauges(self, now: float) -> None:
        """Forget other gateways' requests once the last gauges are too old."""
        if now - self._read_at > GAUGES_MAX_AGE:
            self._beyond = self._beyond_waiting = 0.0
            self.gauges(EngineGauges(self._open, len(self._unseen)), now)

    def _first(self, sent: InFlightRequest, now: float) -> None:
        tokens = sent.tokens
        self._prompt += PROMPT_TOKENS_SMOOTHING * (tokens - self._prompt) if self._prompt else tokens
        alone = not self._decoding and len(self._unseen) == 1
        self._unseen.remove(sent)
        if alone:
            # it was read at once
            self._model.start((now - sent.at) / tokens)
            self._rate(tokens, now - sent.at)
        if self._decoding:
            self._firsts.append((now, tokens))
        else:
            self._number += 1
            self._ended, self._came, self._waited = now, 0, len(self._unseen)
            self._last, self._group = _StepTotals(), _StepTotals()
        self._decoding += 1
        self._context += sent.prompt
        self._shared += sent.prompt - sent.tokens
        self._tell()

    def _end_step(self, now: float) -> None:
        """A step ended just now."""
        middle, last = (self._ended + now) / 2, self._last
        step, waited = _StepTotals(), self._waited
        for when, tokens in self._firsts:
            if when < middle:
                last.prompt_tokens += tokens
                waited -= 1
            else:
                step.prompt_tokens += tokens
        self._firsts.clear()
        self._waited = len(self._unseen)
        if last.count:
            self._join(last)
        step.count, step.seconds = 1, now - self._ended
        step.batches, step.contexts = self._decoding + self._others, self._context
        size = self._view.max_batch_size
        # in a full batch nothing is read
        if waited > 0 and (not size or step.batches <= size):
            step.reading = step.seconds
        self._last = step
        self._number += 1
        self._ended, self._came = now, 0
        self._tell()

    def _join(self, step: _StepTotals) -> None:
        """Add a step to its group. A group ends with a prompt that was read, or after some steps without one."""
        group = self._group
        if step.reading and not group.reading and group.count:
            self._observe_group()
            group = self._group
        group.add(step)
        self._reads += PROMPT_TOKENS_SMOOTHING * (step.prompt_tokens - self._reads)
        if step.prompt_tokens or (not group.reading and group.count >= DECODE_STEPS_PER_OBSERVATION):
            self._observe_group()
        elif group.count >= MAX_STEPS_PER_OBSERVATION:
            self._group = _StepTotals()

    def _observe_group(self) -> None:
        group, self._group = self._group, _StepTotals()
        if group.count and (group.prompt_tokens or not group.reading):
            per = 1 / group.count
            self._model.add(group.batches * per, group.contexts * per, group.prompt_tokens * per, group.seconds * per)
            if group.prompt_tokens and group.reading:
                self._rate(group.prompt_tokens, group.reading)

    def _rate(self, tokens: float, seconds: float) -> None:
        """So many prompt tokens were read in this time."""
        self._rates.append((tokens / max(seconds, 1e-6), tokens))
        self._next_rate -= 1
        if self._next_rate <= 0:
            self._next_rate = min(len(self._rates), 16)
            self._view.prefill_rate = _weighted_median(self._rates)

    def _idle(self) -> None:
        """None of this gateway's sequences decodes: steps cannot be seen."""
        if self._last.count:
            self._join(self._last)
        if not self._group.reading:
            self._observe_group()
        self._last, self._group = _StepTotals(), _StepTotals()
        self._firsts.clear()

    def _tell(self) -> None:
        view = self._view
        view.running = self._decoding + self._others
        if self._decoding and self._model:
            view.step_seconds = self._model.seconds(view.running, self._context, self._reads)
        if view.blocks:
            grown = (self._context - self._shared - self._held) / view.tokens_per_block
            view.free_blocks = round(min(max(self._gauges.free_blocks - grown, 0), view.blocks))


def _weighted_median(rates: deque[tuple[float, float]]) -> float:
    """Return the median of the rates, weighted by tokens: short prompts only say how long a step takes."""
    half, passed, median = sum(tokens for _, tokens in rates) / 2, 0.0, 0.0
    for rate, tokens in sorted(rates):
        if passed < half:
            median = rate
        passed += tokens
    return median
