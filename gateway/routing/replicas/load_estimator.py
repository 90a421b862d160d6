"""An estimate of the state of a replica that does not report it, from this gateway's own streams.

NVIDIA's C++ backend sends no step messages. A gateway knows when it sent a request and when tokens
arrive, and reads the server's gauges twice a second. From these, it derives the fields of a
`ReplicaView`. The code is pure: callers pass the time, so that the simulator runs this code
unchanged.

A decoding sequence gets one token per step. A step has therefore ended when a sequence gets its
second token since the last step ended. A request without a first token still waits for its prefill.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from llmops.gateway.interfaces import ReplicaView
from llmops.gateway.routing.cost_model import ReportedSteps
from llmops.gateway.routing.replicas.in_flight import InFlightRequest, InFlightTracker

#: Number of steps after which a group with a waiting prompt and no finished prefill is dropped.
MAX_STEPS_PER_GROUP = 512
#: Weight of the newest prompt in the mean of uncached tokens in this gateway's prompts.
PROMPT_TOKENS_SMOOTHING = 0.1
#: Share of the decoding sequences that must have a token of a step before the next step can begin.
#: Many tokens that a slow reader finds at once are therefore not counted as steps.
STEP_MAJORITY = 0.5

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
        blocks: Number of blocks in the KV cache, 0 if unknown.
        free_blocks: Number of free blocks.
        tokens_per_block: Number of tokens in each block.
    """

    active: int = 0
    waiting: int = 0
    blocks: int = 0
    free_blocks: int = 0
    tokens_per_block: int = 0


class LoadEstimator:
    """An estimator of one replica's state, which keeps the replica's view up to date.

    In the view, `in_flight` counts the requests without a first token and `running` the others.
    `running` and `waiting` include requests of other gateways as far as the gauges show them.
    """

    def __init__(self, view: ReplicaView, in_flight: InFlightTracker) -> None:
        view.source = "measured"
        self._view, self._in_flight = view, in_flight
        self._times = ReportedSteps()
        # `_decoding` counts own decoding sequences, `_context` their tokens in the cache, `_shared`
        # the tokens of these that were cached before, and `_open` all own requests.
        self._decoding = self._context = self._shared = self._open = 0
        # `_step` is the number of the latest step, of which `_advanced` sequences have a token. The
        # step ended at `_step_ended` after `_duration` seconds.
        self._step, self._step_ended, self._duration, self._advanced = 0, 0.0, 0.0, 0
        # `_is_reading` is True if prompts waited when the latest step began, and `_waiting` is the
        # number of prompts that wait for the next step.
        self._is_reading, self._waiting = False, 0
        # `_group_steps` and `_group_seconds` are the number and the duration of earlier steps that
        # read parts of prompts without a first token. `_prompt_tokens` counts the uncached tokens
        # of the prompts that got their first token in the latest step.
        self._group_steps, self._group_seconds, self._prompt_tokens = 0, 0.0, 0
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
        # a request that is sent as soon as a step ends arrives before the next step begins
        self._waiting += now - self._step_ended < SAME_STEP_TOLERANCE

    def record_tokens(self, request: InFlightRequest, count: int, now: float) -> bool:
        """Record a message with `count` tokens of a request. Return True for its first message."""
        first = request.step < 0
        if self._advanced >= STEP_MAJORITY * self._decoding and (
            # messages of a step come in any order, so a first token may be late
            now - self._step_ended > self._view.step_seconds / 2 if first else request.step == self._step
        ):
            self._begin_step(now)
        if first:
            self._record_first(request, now)
        if request.step != self._step:
            request.step = self._step
            self._advanced += 1
        request.output += count
        self._context += count
        return first

    def record_end(self, request: InFlightRequest) -> None:
        """Record that a request finished or failed over."""
        self._open -= 1
        if request.step >= 0:
            self._decoding -= 1
            self._context -= request.prompt + request.output
            self._shared -= request.prompt - request.tokens
            self._publish()
        if not self._decoding:
            self._observe()
            self._duration = 0.0

    def update_gauges(self, gauges: EngineGauges, now: float) -> None:
        """Update the estimate from the server's gauges.

        Requests beyond this gateway's own requests belong to other gateways. Gauges are a little
        older than this gateway's counts, so the difference is smoothed.
        """
        view = self._view
        self._excess += GAUGE_SMOOTHING * (gauges.active - self._open - self._excess)
        self._excess_waiting += GAUGE_SMOOTHING * (gauges.waiting - len(self._in_flight) - self._excess_waiting)
        others = max(round(self._excess), 0)
        view.waiting = min(max(round(self._excess_waiting), 0), others)
        self._others = others - view.waiting
        # assume that other gateways' prompts are as long as this gateway's
        view.waiting_tokens = round(view.waiting * self._prompt_mean)
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
        tokens = request.tokens
        self._prompt_mean += PROMPT_TOKENS_SMOOTHING * (tokens - self._prompt_mean) if self._prompt_mean else tokens
        if not self._decoding and len(self._in_flight) == 1:
            # the prefill of this request began at once
            self._times.add_prefill(tokens, now - request.sent_at)
        else:
            self._prompt_tokens += tokens
        self._in_flight.remove(request)
        self._waiting -= self._waiting > 0
        self._decoding += 1
        self._context += request.prompt
        self._shared += request.prompt - request.tokens
        self._publish()

    def _begin_step(self, now: float) -> None:
        """Observe the latest step, whose messages have all arrived, and begin the step that ended at `now`."""
        self._observe()
        self._duration = now - self._step_ended if self._decoding else 0.0
        self._step += 1
        self._step_ended, self._advanced = now, 0
        # a full batch admits no prefill
        has_room = self._decoding + self._others < (self._view.max_batch_size or inf)
        self._is_reading, self._waiting = self._waiting > 0 and has_room, len(self._in_flight)
        self._publish()

    def _observe(self) -> None:
        """Record the latest step, with the earlier steps in which its prompts were read."""
        if self._duration:
            self._group_steps += 1
            self._group_seconds += self._duration
            steps, tokens = self._group_steps, self._prompt_tokens
            if tokens or not self._is_reading:
                # assume that other gateways' prompts are as long as this gateway's
                unseen = self._prompt_mean if self._others else 0.0
                self._times.add(self._group_seconds / steps, tokens / steps, steps, unseen)
            elif steps < MAX_STEPS_PER_GROUP:
                return
        self._group_steps, self._group_seconds, self._prompt_tokens = 0, 0.0, 0

    def _publish(self) -> None:
        view = self._view
        view.running = self._decoding + self._others
        # The steps of other gateways' requests alone are not seen, and an old mean above the objective
        # would keep this gateway away for as long as they run.
        unseen = self._others and not self._decoding
        view.step_seconds, view.prefill_rate = 0.0 if unseen else self._times.seconds, self._times.prefill_rate
        if view.blocks:
            grown = (self._context - self._shared - self._added_before) / view.tokens_per_block
            view.free_blocks = round(min(max(self._gauges.free_blocks - grown, 0), view.blocks))
