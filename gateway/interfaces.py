"""What crosses the borders inside the gateway. The architecture can be read from this file:

    HTTP body ─ openai/ ─▶ EngineRequest ─ Transport ─▶ TokenStream of TokenBatch ─ answers/choice ─▶ Piece ─▶ chunk

`answers/` makes EngineRequests and reads TokenBatches; `triton/` does the opposite; neither knows the other. Where
there are several replicas, or more requests than they can take, an Order says who is next, a Policy where it goes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import Field

from llmops.contract import GuideKind as GuideKind
from llmops.contract import Tensor

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class Guide(NamedTuple):
    """A grammar the output must follow. `text` is the JSON Schema, regular expression or EBNF; empty for `json`."""

    kind: GuideKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0 means no limit."""

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
    """So many micro-dollars in each `day`, `week` (from Monday) or `month`, by UTC's calendar."""

    micros: int
    period: str

    def begins(self, now: datetime) -> datetime:
        """When the period that holds `now` began."""
        midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if self.period == "week":
            return midnight - timedelta(days=midnight.weekday())
        return midnight.replace(day=1) if self.period == "month" else midnight

    def ends(self, now: datetime) -> datetime:
        """When the next one begins."""
        begun = self.begins(now)
        if self.period == "month":
            return (begun + timedelta(days=31)).replace(day=1)
        return begun + timedelta(days=7 if self.period == "week" else 1)


@dataclass(frozen=True, slots=True)
class Quota:
    """What callers with one name (`of`: a key, a tenant, an address) may use together, of all models or of one.

    Requests and tokens (prompt and answer) per minute, requests at once, and money; None is without a limit.
    """

    of: str
    rpm: int | None = None
    tpm: int | None = None
    concurrent: int | None = None
    budget: Budget | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. Without keys everybody is anonymous: `user_id` is then a digest of whatever was sent as a key.

    `share` is the path by which what is scarce is divided, `a/b` for `b` of `a`'s; `scopes` what may be asked for;
    `models` the names that may be used, None for all; `quotas` bound it, the narrowest first; `until`: when what
    it sent as a key ends (Unix seconds).
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
        return self.models is None or model in self.models


class Usage(NamedTuple):
    """Tokens that a request used so far. `cached_tokens` of the prompt; None where the engine does not tell."""

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int | None = None


class Outcome(NamedTuple):
    """How a request ended. `status`: the HTTP status that was sent, 0 if none was.

    `finish`: an answer's finish_reason (of its first choice), or `cancelled`, `engine_lost` or `error`; empty where
    nothing is generated and nothing went wrong. `usage` is None where no tokens were used.
    """

    status: int
    finish: str = ""
    usage: Usage | None = None


class UsageEvent(NamedTuple):
    """One request as it is billed: what every journal, topic and ledger gets, once per `id` (a UUID, in time's order).

    `seq` counts the events of one gateway worker from 0. `input_tokens` include the `cached_tokens`. `cost_micros` are
    micro-dollars by the price `price_id`; without one the ledger asks for the price of its time. `status`: 499 for who
    left, 0 for `finish_reason` `gateway_lost`: a gateway that died with the request.

    Journals outlive an upgrade: new fields go to the end, with a default.
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
    """What one request uses, kept where it outlives this process. None of this raises, or waits."""

    __slots__ = ()

    @abstractmethod
    def begin(self, model: str, answer_id: str, prompt_tokens: int) -> None:
        """The engine is at work for it."""

    @abstractmethod
    def cached(self, tokens: int) -> None:
        """So many of the prompt's were found in the engine's cache."""

    @abstractmethod
    def count(self, tokens: int) -> None:
        """So many have been generated so far."""

    @abstractmethod
    def end(self, outcome: Outcome, first: float = 0.0, replica: str = "", moves: int = 0) -> None:
        """It is over, and the last bytes of its answer go out after this: only the first call counts.

        `first`: perf_counter() when its first tokens came, 0 for never; `replica`: where it ended; `moves`: how often
        it went on elsewhere.
        """


class QuotaReservation(ABC):
    """What one request may use of its caller's quotas: reserved before the work, settled to what it was by its end."""

    __slots__ = ()

    @abstractmethod
    async def tokens(self, model: str, prompt: int, most: int = 0, answers: int = 1, bounded: bool = True) -> int:
        """Reserve `prompt` tokens and `most` for all `answers`; how many of these may come: a budget may pay for less.

        `bounded`: the client said how many, else as many are reserved as answers of `model` mostly have.
        Raises RateLimitError.
        """

    @abstractmethod
    def follow(self, usage: Callable[[], Usage]) -> None:
        """The answer has begun; `usage` says what it has used so far."""

    @abstractmethod
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """What the client is told of its limits."""

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """The request is over."""


class SchedulingParams(NamedTuple):
    """When a request is due: whose share of the replicas it takes (`tenant`), of which tier; `arrived` and `deadline`
    (for its first token) in seconds of perf_counter.
    """

    tenant: str = ""
    tier: str = ""
    arrived: float = 0.0
    deadline: float = math.inf


DEFAULT_SCHEDULING = SchedulingParams()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One validated, tokenised request: what the tensor contract (docs/contract.md) can say.

    `end_ids` all end a sequence (empty: nothing does but the length); `stop_words` and `bad_words` are token sequences.
    `caller`: the share of who asks (`Caller.share`), for fair turns among those whose grammars are new to the engine.
    `cache_salt`: prefixes are shared with requests that have the same one only, where the engine keeps them apart.
    `extras`: numbers for inputs of the contract that have no field here; those that only engine models of ours know are
    left out for others. `without`: replicas that cannot have it, where there are several; `moved`: it has begun before,
    on one that could not finish it. `whole`: nothing of it is shown before all of it is there, so that it may begin
    anew. `trace`: W3C's `traceparent` for the engine's server, if it is to tell of it.
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
    guide: Guide | None = None
    caller: str = ""
    cache_salt: int = 0
    extras: Mapping[Tensor, float] = field(default_factory=dict)
    streaming: bool = True
    turn: SchedulingParams = DEFAULT_SCHEDULING
    without: frozenset[str] = frozenset()
    moved: bool = False
    whole: bool = False
    trace: str = ""


#: The most likely tokens at one place with their log-probabilities, the likeliest first.
TopLogprobs = Sequence[tuple[int, float]]


class TokenBatch(NamedTuple):
    """New tokens of one sequence (0 … n-1) of a request, in order; `logprobs` has one natural-log value per token, and
    `tops` the alternatives of each, where they were asked for.

    `anew`, of `whole` requests only: there are no tokens, and what came of the sequence before does not count.
    """

    sequence: int
    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None
    anew: bool = False
    tops: Sequence[TopLogprobs] | None = None


TokenSink = Callable[[TokenBatch], bool]


class Failover(NamedTuple):
    """An answer, or a part of it, went on elsewhere: why, from which replica to which (empty where several parts went),
    and from when to when a place was looked for (perf_counter)."""

    reason: str
    left: str
    to: str
    began: float
    ended: float


class TokenStream(ABC):
    """The tokens of one request as they come. Ends (StopAsyncIteration) after the engine's final response.

    Raises EngineError for what the engine breaks on, UnsupportedError for what it refuses, UnavailableError when Triton
    is not there, and CancelledStreamError after `cancel`. `cached_tokens`: of the prompt, found in the engine's cache;
    None until its first token, and where the engine does not tell. `ended`: sequences that the engine called ended,
    of several. `replica`: where it runs, where there are several. `moves`: each time that it went on elsewhere;
    `splices`: how often, by whether the text is what it would have been: `exact`, or `approximate`.
    """

    cached_tokens: int | None = None
    ended: Collection[int] = frozenset()

    @property
    def moves(self) -> Sequence[Failover]:
        return ()

    @property
    def replica(self) -> str:
        return ""

    @property
    def splices(self) -> Mapping[str, int]:
        return {}

    @property
    def is_failing_over(self) -> bool:
        """Whether it looks for another replica: nothing that comes meanwhile is late."""
        return False

    def __aiter__(self) -> TokenStream:
        return self

    @abstractmethod
    async def __anext__(self) -> TokenBatch: ...

    def attach(self, sink: TokenSink, taken: list[TokenBatch] | None = None) -> None:
        """While the reader waits in `__anext__`, batches may go to `sink` at once; the reader gets those for which it
        returns False, everything else that happens, and what `sink` raises. Most streams wake their reader every time.
        `taken` gets those that `sink` took.
        """
        return

    @abstractmethod
    def cancel(self) -> None:
        """Take the request out of the engine's batch at once. May be called twice, and after the end."""


class Engine(ABC):
    """A model that turns EngineRequests into TokenStreams. `gated`: requests may have to wait for it, or be refused."""

    gated = False

    def check(self, turn: SchedulingParams) -> None:
        """Before anything is known of a request. Raises UnavailableError where it would wait for too long."""
        return

    @abstractmethod
    async def open(self, request: EngineRequest) -> TokenStream: ...

    async def close(self) -> None:
        """Release what the engine holds; open streams end with UnavailableError."""
        return


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine target can do beyond the plain contract; a request for anything else gets 400."""

    logprobs: bool = False
    top_logprobs: int = 0
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
    """A LoRA adapter that is served under its own model name."""

    name: str
    id: int


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's makers recommend where a request says nothing; None leaves it to OpenAI's default."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What an engine model announces of itself (`llmops_model_metadata`), checked as it is read. Lengths in
    tokens; `built` in Unix seconds.

    `state`, `kv_events` and `cached_tokens`: what its step stream says of the engine; `batch_invariant`: whether what a
    request gets does not depend on what else is in its batch; `engine` and `tokenizer` are
    digests, equal on replicas that may stand in for each other.
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
    built: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


ReplicaState = Literal["starting", "ready", "draining", "suspect", "gone"]
#: Where a replica's numbers come from: its own reports, or the gateway's streams and the server's gauges.
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
        free_blocks: Blocks of the KV cache that no running sequence holds. They may hold cached prefixes.
        blocks: All blocks of the KV cache; 0 while unknown.
        tokens_per_block: Tokens in each block.
        prefill_rate: Prompt tokens per second; 0 while unknown.
        step_seconds: Mean duration of the latest steps; 0 while unknown.
        max_batch_size: Sequences in a batch; 0 while unknown.
        in_flight: Requests that this gateway has sent and the replica's state does not include yet.
        in_flight_tokens: Uncached prompt tokens of the in-flight requests.
        subscribers: Gateways that use the replica.
        demand: Sum of the weights that all gateways declare (`TieredQueue.demand`), this one included.
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
    """What the choice of a replica depends on.

    Attributes:
        tokens: Tokens of the prompt.
        ids: Token ids of the prompt as the engine gets them, INT32.
        answer: Expected output tokens.
        salt: Number that keeps the prefixes of tenants apart; 0 if they are shared.
        adapter: Name of the LoRA adapter, empty for none.
        without: Replicas that failed on this request.
        hashes: Hashes of the prompt's blocks where they are known already.
    """

    tokens: int
    ids: bytes = b""
    answer: int = 0
    salt: int = 0
    adapter: str = ""
    without: frozenset[str] = frozenset()
    hashes: Sequence[int] | None = None


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
        """Assume that a replica that reports no evictions holds the `blocks` most recently used blocks."""
        ...

    def forget(self, replica_id: str) -> None:
        """Record that a replica's cache is empty, or that the replica is gone."""
        ...


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request waiting for a replica. Times are in seconds of the clock that the queue is called with.

    Attributes:
        tenant: Tenant that is charged.
        routing: What the choice of a replica depends on.
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
