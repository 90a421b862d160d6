"""What a replica is for a request: whether it may have it, and the seconds until its first token there."""

from __future__ import annotations

from math import inf

from llmops.gateway.interfaces import ReplicaView, RoutingPolicy, RoutingRequest

# Prompt tokens/s and seconds of a step, as long as a replica has not shown its own: a 7B model on one data-centre GPU.
DEFAULT_PREFILL_RATE = 20_000.0
DEFAULT_STEP_SECONDS = 0.02
# What a second of a whole answer weighs beside one until its first token: where caches are full of what runs, its
# objective is about so much longer; where they are empty more, as what is read again displaces nothing there.
DECODE_WEIGHT_WHEN_FULL, DECODE_WEIGHT_WHEN_EMPTY, DECODE_WEIGHT_EXPONENT = 1 / 80, 1 / 8, 5
# What a second of reading costs those who are there, in a replica that is full: it holds up all that run, and all that
# come meanwhile. In one that is half full a quarter of it: fewer are held up, and fewer come.
INTERFERENCE_WEIGHT = 8.0


class PrefillRate:
    """Prompt tokens/s, from steps that read some.

    A step counts by its tokens: a few of them beside a large batch say how long a step takes, not how fast prompts are
    read.
    """

    KEPT = 0.98  # of what is known, per step

    def __init__(self) -> None:
        self._squares = self._weighted = 0.0

    def add(self, tokens: int, seconds: float) -> float:
        """What it is, with one more step of so many tokens and seconds."""
        self._squares = self.KEPT * self._squares + tokens * tokens
        self._weighted = self.KEPT * self._weighted + tokens * seconds
        return self._squares / self._weighted


def uncached_tokens(policy: RoutingPolicy, wanted: RoutingRequest, view: ReplicaView) -> int:
    """Prompt tokens that would be read there. The last one always is: its logits are the answer's first."""
    uncached = wanted.tokens - policy.cached(wanted, view)
    return uncached if uncached > 1 else 1


def time_to_first_token(view: ReplicaView, uncached: float, answer: float) -> float:
    """Seconds until the first token of a prompt of which `uncached` tokens are to be read.

    What waits there is read before it, beside a step of the sequences that run; and where the batch is full, some of it
    has to end before: a sequence takes about `answer` steps, and they end one after another.
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
    """What is compared: the seconds until the first token, a little (`weight`, of `decode_weight`) of those by which the
    whole answer, with those that run beside it, takes longer than in an empty replica, and what reading it costs the
    `others` there. `held`: its `kv_cache_load`, if that is known. Where it is not `below`, a part of it is said."""
    rate = view.prefill_rate or DEFAULT_PREFILL_RATE
    seconds = (uncached + view.waiting_tokens + view.in_flight_tokens) / rate
    if seconds >= below:
        return seconds
    step, size, full = view.step_seconds or DEFAULT_STEP_SECONDS, view.max_batch_size, 0.0
    seconds += step
    if size:
        there = view.running + view.waiting + view.unseen
        full = there / size
        if there >= size:
            seconds += (there + 1 - size) * answer * step / size
    if seconds < below:
        held = kv_cache_load(view) if held is None else held
        full = full if full > held else held
        seconds += weight * (answer * step * full)
        seconds += others * full * full * uncached / rate
    return seconds


def decode_weight(held: float) -> float:
    """What a second of a whole answer weighs where such a part of the caches is held by what runs."""
    free = 0.0 if held > 1 else 1.0 if held < 0 else 1 - held
    return DECODE_WEIGHT_WHEN_FULL + (DECODE_WEIGHT_WHEN_EMPTY - DECODE_WEIGHT_WHEN_FULL) * free**DECODE_WEIGHT_EXPONENT


def kv_cache_load(view: ReplicaView, tokens: float = 0.0) -> float:
    """The share of the KV cache that is held, were these tokens and what the replica has not seen yet in it."""
    blocks = view.blocks
    if not blocks:
        return 0.0
    return 1 - (view.free_blocks - (tokens + view.in_flight_tokens) / view.tokens_per_block) / blocks


def occupancy(view: ReplicaView) -> float:
    """How full a replica is, by what is shortest: places in its batch or the KV cache."""
    held, size = kv_cache_load(view), view.max_batch_size
    if not size:
        return held
    places = (view.running + view.waiting + view.unseen) / size
    return places if places > held else held


def can_serve(view: ReplicaView, wanted: RoutingRequest) -> bool:
    """Whether a request may go there at all, however long it would take."""
    if view.replica_id in wanted.without or (wanted.adapter and wanted.adapter not in view.adapters):
        return False
    return view.version == wanted.version if wanted.version else view.weight > 0
