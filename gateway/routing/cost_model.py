"""The cost of a request on a replica: seconds to its first token, load, and eligibility.

The code is pure: it uses neither a clock nor I/O.
"""

from __future__ import annotations

from math import inf

from llmops.gateway.interfaces import ReplicaView, RoutingPolicy, RoutingRequest

#: Prefill rate in tokens/s that is assumed until a replica's rate is known: the rate of a 7B model
#: on a data-centre GPU.
DEFAULT_PREFILL_RATE = 20_000.0
#: Number of steps over which the mean step time is computed.
STEP_TIME_STEPS = 10
#: Multiple of the expected time up to which a reported step counts, so that a step that was held up
#: does not distort the mean.
OUTLIER_FACTOR = 3.0
#: Seconds per step that are assumed until a replica's step time is known: 50 tokens/s per answer.
DEFAULT_STEP_SECONDS = 0.02
#: Weight of a second of decoding relative to a second until the first token, if the caches are
#: full. The usual objective for a whole answer is about 80 times the objective for the first token.
DECODE_WEIGHT_WHEN_FULL = 1 / 80
#: Weight of a second of decoding relative to a second until the first token, if the caches are
#: empty. Higher than for full caches, because prefill is cheaper when it delays few other requests.
DECODE_WEIGHT_WHEN_EMPTY = 1 / 8
#: Exponent of the free share of the KV caches, by which the weight of decoding falls from
#: DECODE_WEIGHT_WHEN_EMPTY to DECODE_WEIGHT_WHEN_FULL.
DECODE_WEIGHT_EXPONENT = 5
#: Cost of a second of prefill for the other requests of a full replica, because it delays all
#: running requests and all that arrive meanwhile. On a half-full replica, the cost is a quarter:
#: fewer requests are delayed, and fewer arrive.
INTERFERENCE_WEIGHT = 8.0
#: Factor by which PrefillRate reduces the weight of earlier steps with each step, so that the
#: estimate follows changes.
PREFILL_RATE_DECAY = 0.98


class PrefillRate:
    """The prompt tokens per second of a replica, estimated from steps with prefill.

    Steps are weighted by their prompt tokens: the duration of a step with few prompt tokens and a
    large batch tells the step time, not the prefill rate.
    """

    def __init__(self) -> None:
        self._squares = self._weighted_seconds = 0.0

    def add(self, tokens: float, seconds: float) -> float:
        """Return the estimate after one more step of `seconds` with `tokens` prompt tokens."""
        self._squares = PREFILL_RATE_DECAY * self._squares + tokens * tokens
        self._weighted_seconds = PREFILL_RATE_DECAY * self._weighted_seconds + tokens * seconds
        return self._squares / self._weighted_seconds


class ReportedSteps:
    """The mean step time and the prefill rate of a replica.

    The newest step has the weight 1 / STEP_TIME_STEPS in the mean, and the first steps have equal
    weights: the very first step reads a prompt, and must not determine the mean. A step that takes
    longer than OUTLIER_FACTOR times the expected time counts for that time, because it tells
    nothing about the next steps.
    """

    def __init__(self) -> None:
        self.seconds = self.prefill_rate = 0.0
        self._steps, self._prefill = 0, PrefillRate()

    def add_prefill(self, tokens: float, seconds: float) -> None:
        """Add a prompt of `tokens` that was read alone in `seconds`, whose steps are not known."""
        self.prefill_rate = self._prefill.add(tokens, seconds)

    def add(self, seconds: float, prompt_tokens: float = 0, count: int = 1, unseen_tokens: float = 0.0) -> None:
        """Add `count` steps of `seconds` each, in each of which `prompt_tokens` were read.

        The steps may also have read `unseen_tokens` of other gateways' prompts.
        """
        read = max(prompt_tokens, unseen_tokens)
        if self._steps and (self.prefill_rate or not read):
            expected = self.seconds + (read / self.prefill_rate if read else 0.0)
            seconds = min(seconds, OUTLIER_FACTOR * expected)
        self.seconds = self.after(seconds, count)
        self._steps += count
        if prompt_tokens:
            self.add_prefill(prompt_tokens, seconds)

    def after(self, seconds: float, count: int) -> float:
        """Return the mean step time as it will be after `count` further steps of `seconds`."""
        mean, first = self.seconds, min(max(STEP_TIME_STEPS - self._steps, 0), count)
        if first:
            mean = (mean * self._steps + seconds * first) / (self._steps + first)
        return mean + (seconds - mean) * (1 - (1 - 1 / STEP_TIME_STEPS) ** (count - first))


def uncached_tokens(policy: RoutingPolicy, request: RoutingRequest, view: ReplicaView) -> int:
    """Return the number of prompt tokens to compute on a replica.

    The last token of a prompt is always computed, because its logits are the first output.
    """
    uncached = request.tokens - policy.cached(request, view)
    return uncached if uncached > 1 else 1


def time_to_first_token(view: ReplicaView, uncached: float, answer: float) -> float:
    """Return the seconds until the first token of a prompt with `uncached` tokens to compute.

    The prompts that wait on the replica are computed first, each beside a step of the running
    sequences. If the batch is full, a sequence must end first. A sequence takes about `answer`
    steps, and the sequences end one after another.
    """
    return routing_cost(view, uncached, answer, 0.0, held=0.0, others=0.0)


def routing_cost(
    view: ReplicaView,
    uncached: float,
    answer: float,
    weight: float,
    held: float | None = None,
    below: float = inf,
    others: float = INTERFERENCE_WEIGHT,
) -> float:
    """Return the cost of a request on a replica, in seconds. Replicas are compared by this cost.

    The cost is the sum of the seconds until the first token, `weight` times the seconds by which
    decoding takes longer than on an empty replica, and the cost of the prefill for the requests
    that run there.

    Args:
        view: The replica.
        uncached: Prompt tokens to compute.
        answer: Expected output tokens.
        weight: Weight of decoding, from `decode_weight`.
        held: The replica's `kv_cache_load`, if the caller has computed it.
        below: The lowest cost so far. The computation stops early once the cost is not lower.
        others: Weight of the cost for other requests.

    No term may be negative, because the sum ends early at `below`. `time_to_first_token` sets the
    weights to 0, so every term that does not delay the first token needs a weight.
    """
    rate = view.prefill_rate or DEFAULT_PREFILL_RATE
    seconds = (uncached + view.waiting_tokens + view.in_flight_tokens) / rate
    if seconds >= below:
        return seconds
    step, size, full = view.step_seconds or DEFAULT_STEP_SECONDS, view.max_batch_size, 0.0
    seconds += step
    if size:
        sequences = view.running + view.waiting + view.in_flight
        full = sequences / size
        if sequences >= size:
            seconds += (sequences + 1 - size) * answer * step / size
    if seconds < below:
        held = kv_cache_load(view) if held is None else held
        full = full if full > held else held
        seconds += weight * (answer * step * full)
        seconds += others * full * full * uncached / rate
    return seconds


def decode_weight(held: float) -> float:
    """Return the weight of a second of decoding in the routing cost.

    `held` is the share of the KV caches that running sequences hold.
    """
    free = 0.0 if held > 1 else 1.0 if held < 0 else 1 - held
    return DECODE_WEIGHT_WHEN_FULL + (DECODE_WEIGHT_WHEN_EMPTY - DECODE_WEIGHT_WHEN_FULL) * free**DECODE_WEIGHT_EXPONENT


def kv_cache_load(view: ReplicaView, tokens: float = 0.0) -> float:
    """Return the share of a replica's KV cache that is held, including in-flight requests.

    `tokens` further tokens are counted as held too.
    """
    blocks = view.blocks
    if not blocks:
        return 0.0
    return 1 - (view.free_blocks - (tokens + view.in_flight_tokens) / view.tokens_per_block) / blocks


def occupancy(view: ReplicaView) -> float:
    """Return how full a replica is: the higher of the used shares of its slots and KV cache."""
    held, size = kv_cache_load(view), view.max_batch_size
    if not size:
        return held
    slots = (view.running + view.waiting + view.in_flight) / size
    return slots if slots > held else held


def can_serve(view: ReplicaView, request: RoutingRequest) -> bool:
    """Return True if a replica has the request's adapter and has not failed on the request."""
    return view.replica_id not in request.without and (not request.adapter or request.adapter in view.adapters)
