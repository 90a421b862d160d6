"""The types that the packages of the gateway exchange.

The architecture can be read from this module:

    body ─ api ─▶ EngineRequest ─ routing, triton ─▶ TokenStream of TokenBatch
         ─ generation ─▶ OutputDelta ─ api ─▶ chunk

`generation` makes EngineRequests and reads TokenBatches, `triton` does the opposite, and neither
knows the other. With several replicas a WaitingQueue decides which request is next, and a
RoutingPolicy which replica gets it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, get_args

from pydantic import Field

from llmops.clocks import period_start
from llmops.contract import GuideKind as GuideKind
from llmops.contract import Tensor

#: The finish reason of a choice, set by `generation/choice.py`. OpenAI's chats and completions send
#: it as it is. The Responses API (`conversations/response_builder.py`) and Anthropic's
#: (`api/anthropic/stream_events.py`) translate it, and the chat page's CUTS (`web/assets/chat.js`)
#: explains an early end.
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
#: All finish reasons. The outcome of a request that was cancelled or failed is not among them.
FINISH_REASONS: frozenset[str] = frozenset(get_args(FinishReason))


class Guide(NamedTuple):
    """A grammar that the output must follow.

    `text` is the JSON Schema, regular expression or EBNF; empty for `json`.
    """

    kind: GuideKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the choice of the next token. `temperature` 0 is greedy; `top_k` 0 is no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """An amount in micro-dollars for each `day`, `week` (from Monday) or `month` of UTC's calendar."""

    micros: int
    period: str

    def begins(self, now: datetime) -> datetime:
        """Return the start of the period that contains `now`."""
        return period_start(now, self.period)

    def ends(self, now: datetime) -> datetime:
        """Return the start of the next period."""
        begun = self.begins(now)
        if self.period == "month":
            return (begun + timedelta(days=31)).replace(day=1)
        return begun + timedelta(days=7 if self.period == "week" else 1)


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of all callers with one name together, for all models or for one. None is no limit.

    Attributes:
        of: The name: a key, a tenant or an address.
        rpm: Requests per minute.
        tpm: Tokens per minute, of prompts and answers.
        concurrent: Requests at once.
        budget: Money per period.
        model: The model, None for all.
    """

    of: str
    rpm: int | None = None
    tpm: int | None = None
    concurrent: int | None = None
    budget: Budget | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Attributes:
        tenant_id: The tenant, empty without API keys.
        user_id: The user. For anonymous callers a digest of what was sent as a key.
        key_id: The API key.
        share: The path by which scarce resources are divided fairly: `a/b` is `b`'s part of `a`'s
            part.
        tier: The tier of the key.
        priority: The priority of the key, for usage records.
        scopes: What the caller may request.
        models: Names of models that the caller may use, None for all.
        quotas: The caller's limits, the narrowest first.
        until: When the credential expires, in Unix seconds.
    """

    tenant_id: str = ""
    user_id: str = ""
    key_id: str = ""
    share: str = ""
    tier: str = ""
    priority: int = 0
    scopes: frozenset[str] = frozenset({"inference"})
    models: frozenset[str] | None = None
    quotas: tuple[Quota, ...] = ()
    until: float = math.inf

    @property
    def owner(self) -> str:
        """Return the owner of the resources that this caller creates: its user.

        Without accounts that is a digest of whatever was sent as a key, empty if nothing was.
        """
        return self.user_id or self.tenant_id

    def may_use(self, model: str) -> bool:
        """Return True if the caller may use the model."""
        return self.models is None or model in self.models


class Usage(NamedTuple):
    """Tokens that a request has used.

    `cached_tokens` are part of the prompt, None if the engine does not report them.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int | None = None


class Outcome(NamedTuple):
    """The end of a request.

    Attributes:
        status: The HTTP status that was sent, 0 if none was.
        finish: The finish reason of the first choice, or `cancelled`, `engine_lost` or `error`;
            empty if nothing was generated and nothing failed.
        usage: The tokens, None if none were used.
    """

    status: int
    finish: str = ""
    usage: Usage | None = None


class UsageEvent(NamedTuple):
    """One request as it is billed, in outboxes, topics and the ledger.

    Outboxes outlive an upgrade: new fields go to the end, with a default.

    Attributes:
        id: A UUID in the order of time. An event counts once per id.
        seq: The number of the event in its gateway, from 0.
        input_tokens: Tokens of the prompt, including `cached_tokens`.
        cost_micros: The price in micro-dollars by `price_id`. Without an id the ledger looks the
            price up.
        status: The HTTP status; 499 if the client left, 0 with `finish_reason` `gateway_lost` if
            the gateway died.
        migrations: How often the request moved to another replica.
    """

    id: str
    gateway_id: str
    seq: int
    at: datetime
    request_id: str
    tenant_id: str
    user_id: str
    key_id: str
    model: str
    input_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost_micros: int = 0
    price_id: str | None = None
    status: int = 200
    finish_reason: str | None = None
    ttft_ms: int | None = None
    latency_ms: int | None = None
    priority: str | None = None
    version: str | None = None
    replica: str | None = None
    migrations: int = 0


class UsageRecorder(ABC):
    """A recorder of one request's usage that outlives the process. No method raises or waits."""

    @property
    @abstractmethod
    def event_id(self) -> str:
        """Return the id of the usage event, empty before `begin`. The ledger counts an id once."""

    @abstractmethod
    def begin(
        self, model: str, answer_id: str, prompt_tokens: int, *, event_id: str = "", known_tokens: int = 0
    ) -> None:
        """Record that an engine starts to work on the request.

        Args:
            model: The model's name.
            answer_id: The id of the answer.
            prompt_tokens: Tokens of all prompts.
            event_id: The id of the usage event of an answer that another gateway began.
            known_tokens: Tokens that the other gateway generated. `count` does not include them.
        """

    @abstractmethod
    def cached(self, tokens: int) -> None:
        """Record the prompt's tokens that the engine found in its cache."""

    @abstractmethod
    def count(self, tokens: int) -> None:
        """Record the number of tokens generated so far."""

    @abstractmethod
    def end(self, outcome: Outcome, first: float = 0.0, replica: str = "", moves: int = 0) -> None:
        """Record the end, before the last bytes of the response are sent.

        Only the first call counts.

        Args:
            outcome: How the request ended.
            first: perf_counter() at its first tokens, 0 if there were none.
            replica: The id of its last replica.
            moves: How often it moved to another replica.
        """

    @abstractmethod
    def hold(self) -> None:
        """Keep the end back until `settle`: another gateway may have taken the answer over."""

    @abstractmethod
    def settle(self, owner: UsageOwner) -> None:
        """Write the end that was kept back, or leave the bill to another gateway."""


def shared_answer_id(owner: str, answer_id: str) -> str:
    """Return the id under which gateways share an answer of `owner`.

    A client may have chosen the id of its own answer, so that two owners may have the same one.
    """
    return f"{owner}:{answer_id}"


class UsageOwner(Enum):
    """The gateway that bills an answer which several gateways generated.

    HERE: this gateway bills all of it. ELSEWHERE: another gateway has taken the answer over and
    bills all of it. OFFERED: any gateway may take it over, and until one does, what this gateway
    recorded on its disk is the only record.
    """

    HERE = 1
    ELSEWHERE = 2
    OFFERED = 3


class QuotaReservation(ABC):
    """The part of its caller's quotas that a request holds.

    It is reserved before the work and settled when the request ends.
    """

    @property
    @abstractmethod
    def reserved_tokens(self) -> int:
        """Return the tokens that are reserved for prompt and answers; 0 without a limit on tokens."""

    @abstractmethod
    async def tokens(
        self,
        model: str,
        prompt: int,
        most: int = 0,
        answers: int = 1,
        bounded: bool = True,
        known: int | None = None,
    ) -> int:
        """Reserve tokens for the prompt and all answers.

        Args:
            model: The model's name; empty for tokens of no bill, which no usage settles. They count
                and cost nothing, but a used-up budget rejects them.
            prompt: Tokens of the prompt.
            most: The most tokens of all answers together.
            answers: The number of answers.
            bounded: True if the client set `most`. Else the usual length of the model's answers is
                reserved.
            known: The tokens that a gateway which is gone has reserved for the same request. They
                are not reserved again.

        Returns:
            The answer tokens granted, which is less than `most` if the budget pays for less.

        Raises:
            RateLimitError: A limit is reached.
        """

    @abstractmethod
    def follow(self, usage: Callable[[], Usage]) -> None:
        """Update the reservation from now on with the usage of a running answer.

        `usage` returns what the answer has used so far.
        """

    @abstractmethod
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Return the response headers that describe the caller's limits."""

    @abstractmethod
    def hand_over(self) -> None:
        """Leave the reserved tokens to the gateway that takes the answer over, which settles them."""

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Settle the reservation with the usage of `outcome`."""


class SchedulingParams(NamedTuple):
    """The attributes by which requests are queued.

    Attributes:
        tenant: The path of the caller's fair share of the replicas.
        tier: The tier.
        arrived: perf_counter() at the request's arrival.
        deadline: perf_counter() at which its first token is due.
    """

    tenant: str = ""
    tier: str = ""
    arrived: float = 0.0
    deadline: float = math.inf


DEFAULT_SCHEDULING = SchedulingParams()


@dataclass(frozen=True, slots=True)
class DegradedLimits:
    """The restrictions of a request to a model in degraded mode.

    Attributes:
        level: The model's level, above 0.
        max_tokens: Tokens of the answer.
        prompt_tokens: Tokens of the prompt; None for any number.
        is_shed: True if the request is rejected.
    """

    level: int
    max_tokens: int
    prompt_tokens: int | None = None
    is_shed: bool = False


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One validated, tokenised request, with the fields of the tensor contract (docs/contract.md).

    Attributes:
        input_ids: The prompt.
        max_tokens: The most tokens of each answer.
        n: The number of answers.
        end_ids: Tokens that end a sequence; without any, only the length does.
        stop_words: Token sequences that end a sequence.
        bad_words: Token sequences that must not be generated.
        guide: The grammar of the output.
        caller: `Caller.share`, for fair turns among requests whose grammars are new to the engine.
        cache_salt: Requests share cached prefixes only with requests that have the same salt.
        cache_key: The client's name for requests that share a prefix; empty for none.
        extras: Values of the contract's inputs without a field here. Engine models of others do not
            get all of them.
        turn: The attributes by which the request is queued.
        without: Ids of replicas that must not get the request.
        moved: True if the request has started on a replica that could not finish it.
        whole: True if nothing is shown before the answer is complete, so that the answer may start
            again.
        trace: W3C's `traceparent` for the engine's server, empty if the request is not traced.
    """

    request_id: str
    input_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    guide: Guide | None = None
    caller: str = ""
    cache_salt: int = 0
    cache_key: str = ""
    extras: Mapping[Tensor, float] = field(default_factory=dict)
    streaming: bool = True
    turn: SchedulingParams = DEFAULT_SCHEDULING
    without: frozenset[str] = frozenset()
    moved: bool = False
    whole: bool = False
    trace: str = ""


#: The most likely tokens at one position with their log-probabilities, the likeliest first.
TopLogprobs = Sequence[tuple[int, float]]


class TokenBatch(NamedTuple):
    """New tokens of one sequence of a request, in order.

    Attributes:
        sequence: The sequence, 0 to n-1.
        tokens: The tokens.
        logprobs: The natural logarithm of each token's probability, if requested.
        tops: The alternatives of each token, if requested.
        prompt: The alternatives of each prompt token but the first, with the request's first
            tokens, if requested.
    """

    sequence: int
    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None
    # the sequence starts again and its earlier tokens do not count; only for `whole` requests
    restarts: bool = False
    tops: Sequence[TopLogprobs] | None = None
    prompt: Sequence[TopLogprobs] | None = None


TokenSink = Callable[[TokenBatch], bool]


class Failover(NamedTuple):
    """A move of an answer, or of a part of it, to another replica.

    Attributes:
        reason: Why the answer moved.
        left: The replica that it left.
        to: The replica that continues it, empty if several parts moved.
        began: perf_counter() at the start of the search for a replica.
        ended: perf_counter() at its end.
    """

    reason: str
    left: str
    to: str
    began: float
    ended: float


class TokenStream(ABC):
    """The tokens of one request as they arrive.

    The iteration ends after the engine's final response.

    Iterating raises EngineError if the engine fails, UnsupportedError if it rejects the request,
    UnavailableError if Triton is not available, and CancelledStreamError after `cancel`.

    Attributes:
        cached_tokens: Tokens of the prompt in the engine's cache, None before the first token or if
            unknown.
        ended: Sequences that have ended, if there are several.
        replica: The id of the current replica, empty if there is only one server.
        version: The version of the model that generates, empty for a model without versions.
        moves: Every move to another replica.
        splices: The number of moves by whether the text is the same after them: `exact` or
            `approximate`.
        is_failing_over: True during the search for another replica, when silence is no timeout.
    """

    cached_tokens: int | None = None
    ended: Collection[int] = frozenset()
    replica: str = ""
    version: str = ""
    moves: Sequence[Failover] = ()
    splices: Mapping[str, int] = MappingProxyType({})
    is_failing_over: bool = False

    def beginning(self) -> Sequence[int]:
        """Return the tokens of the first sequence so far, where they are kept."""
        return ()

    def __aiter__(self) -> TokenStream:
        return self

    @abstractmethod
    async def __anext__(self) -> TokenBatch: ...

    def attach(self, sink: TokenSink, taken: list[TokenBatch] | None = None) -> None:
        """Offer batches to `sink` directly while the reader waits in `__anext__`.

        By default the reader gets them all.

        Args:
            sink: Returns False for a batch that the reader must get. The reader also gets what
                `sink` raises.
            taken: Collects the batches that `sink` took.
        """
        return

    @abstractmethod
    def cancel(self) -> None:
        """Remove the request from the engine's batch immediately.

        Further calls, and calls after the end, do nothing.
        """


class Engine(ABC):
    """A model that turns EngineRequests into TokenStreams.

    If it is `gated`, requests may wait or be rejected.
    """

    gated = False

    def check(self, turn: SchedulingParams) -> None:
        """Raise UnavailableError if a request would wait too long.

        Called before the request is prepared.
        """
        return

    def has_waiting(self, turn: SchedulingParams) -> bool:
        """Return True if requests of the same tenant wait."""
        return False

    @abstractmethod
    async def open(self, request: EngineRequest) -> TokenStream:
        """Submit a request. Waits for a replica if the engine is gated."""

    async def close(self) -> None:
        """Release what the engine holds. Open streams end with UnavailableError."""
        return


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of an engine beyond the plain contract. A request that needs another one gets 400."""

    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    logit_bias: bool = False
    n: Annotated[int, Field(ge=1)] = 1
    guided: tuple[GuideKind, ...] = ()
    bad_words: bool = False
    min_p: bool = False
    callers: bool = False
    seed: bool = True
    penalties: bool = True
    lora: bool = False
    cache_salt: bool = False


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter, which is served under its own model name."""

    name: str
    id: int


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling defaults that the model's makers recommend.

    None leaves a parameter at OpenAI's default.
    """

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The validated metadata that an engine model announces (`llmops_model_metadata`).

    Attributes:
        max_seq_len: The context length, in tokens.
        state: True if the step stream reports the engine's state.
        kv_events: True if the step stream reports changes of the KV cache.
        cached_tokens: True if the step stream reports the cached tokens of prompts.
        batch_invariant: True if an answer does not depend on the other requests of its batch.
        engine: A digest of the engine. Replicas with equal digests can replace each other.
        tokenizer: A digest of the tokenizer.
        template: A digest of the chat template.
        built: When the engine was built, in Unix seconds.
        extra: Further facts.
    """

    name: str
    target: str
    tokenizer_dir: str
    max_seq_len: Annotated[int, Field(gt=1)]
    vocab_size: Annotated[int, Field(gt=0)]
    end_ids: tuple[int, ...]
    max_batch_size: int = 1
    bos_id: int | None = None
    pad_id: int | None = None
    chat_template: bool = True
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    capabilities: Capabilities = field(default_factory=Capabilities)
    adapters: tuple[LoraAdapter, ...] = ()
    transports: tuple[str, ...] = ("request",)
    state: bool = False
    kv_events: bool = False
    cached_tokens: bool = False
    batch_invariant: bool = False
    engine: str = ""
    tokenizer: str = ""
    template: str = ""
    built: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


ReplicaState = Literal["starting", "ready", "draining", "suspect", "gone"]
#: The source of a replica's state: its own reports, or the gateway's streams and the server's
#: metrics.
ReplicaSource = Literal["reported", "measured"]


@dataclass(slots=True)
class ReplicaView:
    """A gateway's view of a model on one server.

    Attributes:
        replica_id: HOST:PORT of the server, with the engine model where the settings name one.
        model: Name under which the model is served.
        version: Version that the engine reports.
        state: Whether requests may be sent; see `HealthCheck`.
        running: Sequences in the engine's batch.
        waiting: Sequences in the engine's own queue.
        waiting_tokens: Prompt tokens of the waiting sequences that are still to be computed.
        free_blocks: Blocks of the KV cache that no running sequence holds. They may hold cached
            prefixes.
        blocks: All blocks of the KV cache; 0 while unknown.
        tokens_per_block: Tokens in each block.
        prefill_rate: Prompt tokens per second; 0 while unknown.
        step_seconds: Mean duration of the latest steps; 0 while unknown.
        max_batch_size: Sequences in a batch; 0 while unknown.
        in_flight: Requests that this gateway has sent and the replica's state does not include yet.
        in_flight_tokens: Uncached prompt tokens of the in-flight requests.
        subscribers: Gateways that use the replica.
        demand: Sum of the weights that all gateways declare (`TieredQueue.demand`), this one
            included.
        adapters: Names of the loaded LoRA adapters.
        source: Whether the replica reports its state or the gateway measures it.
    """

    replica_id: str
    model: str = ""
    version: str = ""
    state: ReplicaState = "starting"
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    blocks: int = 0
    tokens_per_block: int = 32
    prefill_rate: float = 0.0
    step_seconds: float = 0.0
    max_batch_size: int = 0
    in_flight: int = 0
    in_flight_tokens: int = 0
    subscribers: int = 1
    demand: float = 0.0
    adapters: frozenset[str] = frozenset()
    source: ReplicaSource = "reported"

    @property
    def sequences(self) -> int:
        """Return the sequences that the replica has or is about to get."""
        return self.running + self.waiting + self.in_flight


@dataclass(slots=True, eq=False)
class RoutingRequest:
    """The properties of a request on which the choice of a replica depends.

    Attributes:
        tokens: Tokens of the prompt.
        ids: Token ids of the prompt as the engine gets them, INT32.
        answer: Expected output tokens.
        salt: Number that keeps the prefixes of tenants apart; 0 if they are shared.
        adapter: Name of the LoRA adapter, empty for none.
        without: Replicas that failed on this request.
        hashes: Hashes of the prompt's blocks where they are known already.
        affinity: Hash of the client's cache key, None without one. Requests with equal hashes
            prefer the same replica.
    """

    tokens: int
    ids: bytes = b""
    answer: int = 0
    salt: int = 0
    adapter: str = ""
    without: frozenset[str] = frozenset()
    hashes: Sequence[int] | None = None
    affinity: int | None = None


class RoutingPolicy(Protocol):
    """The choice of a replica for a request. It has no clock and does not wait."""

    def choose(self, request: RoutingRequest, views: Sequence[ReplicaView]) -> int | None:
        """Return the index of a view, or None if no replica can take the request."""
        ...

    def cached(self, request: RoutingRequest, view: ReplicaView) -> int:
        """Return the tokens of the prompt that the replica has probably cached."""
        ...

    def sent(self, request: RoutingRequest, view: ReplicaView) -> None:
        """Record that a request was sent to a replica, which will cache its prompt."""
        ...

    def stored(self, replica_id: str, hashes: Sequence[int]) -> None:
        """Record blocks that a replica has cached, by the hashes of `llmops.kv_blocks`."""
        ...

    def removed(self, replica_id: str, hashes: Sequence[int]) -> None:
        """Record blocks that a replica has evicted."""
        ...

    def limit(self, replica_id: str, blocks: int) -> None:
        """Assume that a replica holds the `blocks` most recently used blocks.

        Used for a replica that reports no evictions.
        """
        ...

    def forget(self, replica_id: str) -> None:
        """Record that a replica's cache is empty, or that the replica is gone."""
        ...


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request waiting for a replica.

    Times are in seconds of the clock that the queue is called with.

    Attributes:
        tenant: Tenant that is charged.
        routing: The properties on which the choice of a replica depends.
        arrived: Time of arrival.
        tier: Name of the priority tier.
        weight: Weight of the tenant.
        deadline: Latest time of the first token.
        bytes: Bytes that the request holds while it waits.
        home: Replica that was best on arrival; it alone may get the request until `home_until`.
        home_until: Time after which any replica may get the request.
        moved: True after a failover; the request comes before the others of its tenant.
        uncached_tokens: Prompt tokens to compute on the replica that the request was dispatched to.
        payload: Any object of the caller.
    """

    tenant: str
    routing: RoutingRequest
    arrived: float
    tier: str = ""
    weight: float = 1.0
    deadline: float = math.inf
    bytes: int = 0
    home: str = ""
    home_until: float = 0.0
    moved: bool = False
    uncached_tokens: int = 0
    payload: Any = None

    @property
    def size(self) -> int:
        """Return the tokens that the request needs room for: its prompt and the expected output."""
        return self.routing.tokens + self.routing.answer


class ReplicaCapacity(NamedTuple):
    """The requests that a replica can take.

    Attributes:
        tokens: Tokens of prompt and output that fit.
        replica_id: Requests whose home is this replica come first among equals.
        accepts: Returns True for requests that the replica can serve; None if it can serve all.
        must_yield: Returns True for requests that leave the slot to others; None if none has to.
    """

    tokens: float = math.inf
    replica_id: str = ""
    accepts: Callable[[QueuedRequest], bool] | None = None
    must_yield: Callable[[QueuedRequest], bool] | None = None
