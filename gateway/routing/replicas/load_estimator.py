"""An estimate of the state of a replica that does not report it, from this gateway's own streams.

NVIDIA's C++ backend sends no step messages. A gateway knows when it sent a request and when tokens
arrive, and reads the server's gauges twice a second. From these, it derives the fields of a
`ReplicaView`. The code is pure: callers pass the time, so that the simulator runs this code
unchanged.

A decoding sequence gets one token per step. A step has therefore ended when a sequence gets its
second token since the last step ended. A request without a first token still waits for its prefill.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from llmops.gateway.interfaces import ReplicaView
from llmops.gateway.routing.replicas.in_flight import InFlightRequest, InFlightTracker
from llmops.gateway.routing.replicas.step_time_model import OBSERVATION_WINDOW, FittedStepTimeModel

#: Number of steps without a prompt in one observation, few enough that the batch does not change.
DECODE_STEPS_PER_OBSERVATION = 8
#: Number of steps after which a group with a waiting prompt and no finished prefill is dropped.
MAX_STEPS_PER_OBSERVATION = 512
#: Weight of the newest step in the mean of prompt tokens per step. `Replica` uses the same weight
#: for reported steps.
PROMPT_TOKENS_SMOOTHING = 0.1
#: Share of the decoding sequences that must have a token of a step before the next step can begin.
#: Many tokens that a slow reader finds at once are therefore not counted as steps.
STEP_MAJORITY = 0.5

#: Minimum number of tokens in an observation without a prompt, which bounds the cost per token of a
#: small batch.
DECODE_TOKENS_PER_OBSERVATION = 32

#: Seconds after the end of a step in which a request that is sent still takes part in the next
#: step.
SAME_STEP_TOLERANCE = 1e-4

#: Weight of the newest gauges in the mean of their excess over this gateway's requests. Gauges are
#: older than the gateway's counts, so a single excess is not reliable.
GAUGE_SMOOTHING = 0.5
#: Seconds for which the last gauges are used while no newer gauges can be read.
GAUGES_MAX_AGE = 2.0


class EngineGauges(NamedTuple):
    """The gauges of an engine model, from the server's metrics `nv_trt_llm_*`.

    Attributes:
        active: Number of requests in the engine, including waiting requests.
        waiting: Number of requests whose prompt is still to be computed.
        iterations: Number of steps so far.
        blocks: Number of blocks in the KV cache, 0 if unknown.
        free_blocks: Number of free blocks.
        tokens_per_block: Number of tokens in each block.
    """

    active: int = 0
    waiting: int = 0
    iterations: float = 0.0
    blocks: int = 0
    free_blocks: int = 0
    tokens_per_block: int = 0


class _StepTotals:
    """Sums over engine steps.

    Attributes:
        count: Number of steps.
        batches: Number of sequences that got a token.
        contexts: Number of tokens in the cache of all sequences.
        prompt_tokens: Number of prompt tokens that were computed.
        seconds: Duration of the steps.
        reading: Duration of the steps with prefill, in seconds.
    """

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
    """An estimator of one replica's state, which keeps the replica's view up to date.

    In the view, `in_flight` counts the requests without a first token and `running` the others.
    `running` and `waiting` include requests of other gateways as far as the gauges show them.
    """

    def __init__(self, view: ReplicaView, in_flight: InFlightTracker) -> None:
        view.source = "measured"
        self._view, self._in_flight = view, in_flight
        self._model = FittedStepTimeModel()
        # Tokens per second of the latest prefills, each with the number of its tokens.
        self._rates: deque[tuple[float, float]] = deque(maxlen=OBSERVATION_WINDOW)
        self._next_rate = 1
        # `_decoding` counts own decoding sequences, `_context` their tokens in the cache, `_shared`
        # the tokens of these that were cached before, and `_open` all own requests.
        self._decoding = self._context = self._shared = self._open = 0
        # `_step` is the number of the current step, `_step_ended` the end time of the previous
        # step, and `_advanced` the number of sequences with a token since then.
        self._step, self._step_ended, self._advanced = 0, 0.0, 0
        # First tokens since the previous step ended, each with its time and computed prompt tokens.
        self._first_tokens: list[tuple[float, int]] = []
        # Number of requests without a first token when the previous step ended. Only these can be
        # in the prefill of the next step.
        self._waiting_before = 0
        # `_last_step` is the previous step, to which late first tokens may still belong. The step
        # joins `_group` afterwards.
        self._last_step, self._group = _StepTotals(), _StepTotals()
        # `_steady` steps may still be merged without looking at each, and `_merged` steps have been
        # merged. `_merged_since` and `_merged_context` are the time and the context before them.
        self._steady = self._merged = 0
        self._merged_since, self._merged_context = 0.0, 0
        self._prompt_tokens_mean = 0.0
        # `_others` counts decoding sequences of other gateways, and `_prompt_mean` is the mean of
        # uncached tokens in this gateway's prompts.
        self._others, self._prompt_mean = 0, 0.0
        # `_excess` is the smoothed excess of the gauges over own requests, and `_excess_waiting`
        # the excess over own requests without a first token.
        self._excess = self._excess_waiting = 0.0
        # `_gauges_at` is the time of the latest gauges, and `_added_before` the number of tokens
        # that own sequences had added to the cache by then.
        self._gauges, self._gauges_at, self._added_before = EngineGauges(), 0.0, 0

    def record_sent(self, request: InFlightRequest, now: float) -> None:
        """Record that a request is sent to the replica."""
        request.sent_at, request.step = now, -1
        self._open += 1
        self._add_merged()
        # a request that is sent as soon as a step ends arrives before the next step begins
        self._waiting_before += now - self._step_ended < SAME_STEP_TOLERANCE

    def record_tokens(self, request: InFlightRequest, count: int, now: float) -> bool:
        """Record a message with `count` tokens of a request. Return True for its first message."""
        step = request.step
        first = step < 0
        if first:
            self._record_first(request, now)
        elif step == self._step and self._advanced >= STEP_MAJORITY * self._decoding:
            if self._merged < self._steady:
                self._merged += 1
            else:
                self._begin_totals(self._last_step, now)
            self._step += 1
            self._step_ended, self._advanced = now, 0
        if step != self._step:
            request.step = self._step
            self._advanced += 1
        request.output += count
        self._context += count
        return first

    def record_end(self, request: InFlightRequest) -> None:
        """Record that a request finished or failed over."""
        self._open -= 1
        self._add_merged()
        if request.step >= 0:
            self._decoding -= 1
            self._context -= request.prompt + request.output
            self._shared -= request.prompt - request.tokens
            self._publish()
        if not self._decoding:
            self._idle()

    def update_gauges(self, gauges: EngineGauges, now: float) -> None:
        """Update the estimate from the server's gauges.

        Requests beyond this gateway's own requests belong to other gateways. Gauges are a little
        older than this gateway's counts, so the difference is smoothed.
        """
        view, before = self._view, self._gauges
        self._excess += GAUGE_SMOOTHING * (gauges.active - self._open - self._excess)
        self._excess_waiting += GAUGE_SMOOTHING * (gauges.waiting - len(self._in_flight) - self._excess_waiting)
        others = max(round(self._excess), 0)
        view.waiting = min(max(round(self._excess_waiting), 0), others)
        self._others = others - view.waiting
        # assume that other gateways' prompts are as long as this gateway's
        view.waiting_tokens = round(view.waiting * self._prompt_mean)
        if not self._decoding and before.active and gauges.active and gauges.iterations > before.iterations:
            # without own sequences, only the gauge can count the steps of other gateways' requests
            view.step_seconds = (now - self._gauges_at) / (gauges.iterations - before.iterations)
        self._gauges, self._gauges_at = gauges, now
        if gauges.blocks:
            view.blocks, view.tokens_per_block = gauges.blocks, gauges.tokens_per_block or view.tokens_per_block
            self._added_before = self._context - self._shared
        self._publish()

    def gauges_unavailable(self, now: float) -> None:
        """Ignore other gateways' requests once the latest gauges are too old."""
        if now - self._gauges_at > GAUGES_MAX_AGE:
            self._excess = self._excess_waiting = 0.0
            self.update_gauges(EngineGauges(self._open, len(self._in_flight)), now)

    def _record_first(self, request: InFlightRequest, now: float) -> None:
        self._add_merged()
        tokens = request.tokens
        self._prompt_mean += PROMPT_TOKENS_SMOOTHING * (tokens - self._prompt_mean) if self._prompt_mean else tokens
        alone = not self._decoding and len(self._in_flight) == 1
        self._in_flight.remove(request)
        if alone:
            # the prefill of this request began at once
            self._model.start((now - request.sent_at) / tokens)
            self._rate(tokens, now - request.sent_at)
        if self._decoding:
            self._first_tokens.append((now, tokens))
        else:
            self._step += 1
            self._step_ended, self._advanced, self._waiting_before = now, 0, len(self._in_flight)
            self._last_step, self._group = _StepTotals(), _StepTotals()
        self._decoding += 1
        self._context += request.prompt
        self._shared += request.prompt - request.tokens
        self._publish()

    def _add_merged(self) -> None:
        """Add the merged steps to the totals of the previous step, and merge no further steps."""
        last, count = self._last_step, self._merged
        if count:
            last.count += count
            last.seconds += self._step_ended - self._merged_since
            last.batches += count * (self._decoding + self._others)
            last.contexts += count * (self._merged_context + self._context) / 2
        self._steady = self._merged = 0

    def _begin_totals(self, last: _StepTotals, now: float) -> None:
        """Add the totals `last` to their group, and begin totals with the step that ended at `now`.

        In a small batch without prompts, only the context changes between steps. The next steps are
        therefore merged until they have enough tokens for an observation.
        """
        self._add_merged()
        middle = (self._step_ended + now) / 2
        step, waited = _StepTotals(), self._waiting_before
        for when, tokens in self._first_tokens:
            if when < middle:
                last.prompt_tokens += tokens
                waited -= 1
            else:
                step.prompt_tokens += tokens
        self._first_tokens.clear()
        self._waiting_before = len(self._in_flight)
        if last.count:
            self._join(last)
        step.count, step.seconds = 1, now - self._step_ended
        step.batches, step.contexts = self._decoding + self._others, self._context
        size = self._view.max_batch_size
        # a full batch admits no prefill
        if waited > 0 and (not size or step.batches <= size):
            step.reading = step.seconds
        elif step.batches and not (step.prompt_tokens or self._waiting_before):
            self._steady = int((DECODE_TOKENS_PER_OBSERVATION - 1) // step.batches)
            self._merged_since, self._merged_context = now, self._context
        self._last_step = step
        self._publish()

    def _join(self, step: _StepTotals) -> None:
        """Add the totals of a step to the open group of steps, which becomes one observation.

        A group ends with a finished prefill, or after some steps without prefill.
        """
        group = self._group
        if step.reading and not group.reading and group.count:
            self._observe_group()
            group = self._group
        group.add(step)
        share = 1 - (1 - PROMPT_TOKENS_SMOOTHING) ** step.count
        self._prompt_tokens_mean += share * (step.prompt_tokens / step.count - self._prompt_tokens_mean)
        enough = group.count >= DECODE_STEPS_PER_OBSERVATION and group.batches >= DECODE_TOKENS_PER_OBSERVATION
        if step.prompt_tokens or (enough and not group.reading):
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
        """Record that `tokens` prompt tokens were computed in `seconds`, for the prefill rate."""
        self._rates.append((tokens / max(seconds, 1e-6), tokens))
        self._next_rate -= 1
        if self._next_rate <= 0:
            self._next_rate = min(len(self._rates), 16)
            self._view.prefill_rate = _weighted_median(self._rates)

    def _idle(self) -> None:
        """End the open group of steps when this gateway's last sequence on the replica has ended.

        Without a sequence of its own, the gateway sees no steps.
        """
        self._add_merged()
        if self._last_step.count:
            self._join(self._last_step)
        if not self._group.reading:
            self._observe_group()
        self._last_step, self._group = _StepTotals(), _StepTotals()
        self._first_tokens.clear()

    def _publish(self) -> None:
        view = self._view
        view.running = self._decoding + self._others
        if self._decoding and self._model:
            view.step_seconds = self._model.seconds(view.running, self._context, self._prompt_tokens_mean)
        if view.blocks:
            grown = (self._context - self._shared - self._added_before) / view.tokens_per_block
            view.free_blocks = round(min(max(self._gauges.free_blocks - grown, 0), view.blocks))


def _weighted_median(rates: deque[tuple[float, float]]) -> float:
    """Return the median of prefill rates, each with the number of its prompt tokens as its weight.

    Short prompts only show how long a step takes, so they must not count as much as long prompts.
    """
    half, passed, median = sum(tokens for _, tokens in rates) / 2, 0.0, 0.0
    for rate, tokens in sorted(rates):
        if passed < half:
            median = rate
        passed += tokens
    return median
