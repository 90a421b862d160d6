"""The types that the packages of the gateway exchange.

The module shows the architecture:

    body ─ api ─▶ EngineRequest ─ routing, triton ─▶ TokenStream of TokenBatch
         ─ generation ─▶ OutputDelta ─ api ─▶ chunk

`generation` creates EngineRequests and reads TokenBatches. `triton` sends EngineRequests and
creates TokenBatches. Neither package imports the other. With several replicas, an
AdmissionController determines the next request, and a RoutingPolicy the replica that receives it.
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

#: The finish reason of a choice, set by `generation/choice.py`. Chats and completions of OpenAI's
#: API contain the value itself. The Responses API (`conversations/response_builder.py`) and
#: Anthropic's API (`api/anthropic/stream_events.py`) translate it. The chat page explains an early
#: end (CUTS in `web/assets/chat.js`). A reason of complete answers also belongs in
#: `_NATURAL_FINISH_REASONS` (`ratelimit/limits.py`) and in the condition for titles
#: (`api/conversation_chat.py`). The ledger stores at most 20 characters (`store/tables.py`).
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
#: All finish reasons of a choice. They do not include the outcome of a cancelled or failed request.
FINISH_REASONS: frozenset[str] = frozenset(get_args(FinishReason))


class Guide(NamedTuple):
    """A grammar that the output must follow.

    Attributes:
        kind: The language of the grammar.
        text: The JSON Schema, regular expression or EBNF. Empty for the kind `json`.
    """

    kind: GuideKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request.

    `temperature` 0 selects greedy sampling, and `top_k` 0 all tokens.
    """

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
    """A limit on spending per calendar period, in UTC.

    Attributes:
        micros: The amount in micro-dollars.
        period: The period: `day`, `week` (which begins on Monday) or `month`.
    """

    micros: int
    period: str

    def begins(self, now: datetime) -> datetime:
        """Return the start of the period that contains `now`."""
        return period_start(now, self.period)

    def ends(self, now: datetime) -> datetime:
        """Return the end of the period that contains `now`, which is the start of the next."""
        begun = self.begins(now)
        if self.period == "month":
            return (begun + timedelta(days=31)).replace(day=1)
        return begun + timedelta(days=7 if self.period == "week" else 1)


#: Beginning of the name of a tenant's quotas. The name of a key's quotas is the key's id.
TENANT_PREFIX = "tenant "


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits on all callers of a name together. None is no limit.

    Attributes:
        of: The name: a key, a tenant or an address.
        rpm: The maximum number of requests per minute.
        tpm: The maximum number of tokens per minute, of prompts and answers together.
        concurrent: The maximum number of requests at a time.
        budget: The maximum spending per period.
        model: The model that the limits apply to, None for all models.
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
        user_id: The user. For an anonymous caller, a digest of the key that was sent.
        key_id: The id of the API key.
        share: The path by which scarce resources are divided fairly: `a/b` has a part of the part
            of `a`.
        tier: The tier of the key.
        priority: The priority of the key, for usage records.
        scopes: The scopes that the caller's requests may need.
        models: The names of the models that the caller may use, None for all.
        quotas: The caller's limits, the narrowest first.
        until: The Unix time at which the credential expires, in seconds.
        secret_hash: The SHA-256 of the API key's secret, empty for a token.
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
    secret_hash: str = ""

    @property
    def owner(self) -> str:
        """Return the owner of resources that this caller creates: its user, or else its tenant.

        The user of an anonymous caller is a digest of the key that was sent, empty without a key.
        """
        return self.user_id or self.tenant_id

    @property
    def group(self) -> str:
        """Return the group of callers that this caller shares with: its tenant, or its address."""
        return self.share.partition("/")[0]

    def may_use(self, model: str) -> bool:
        """Return True if the caller may use the model."""
        return self.models is None or model in self.models


class Usage(NamedTuple):
    """The tokens that a request has used.

    Attributes:
        prompt_tokens: The number of tokens in the prompt.
        completion_tokens: The number of generated tokens.
        reasoning_tokens: The number of generated tokens that are reasoning.
        cached_tokens: The number of prompt tokens that the engine found in its cache, None if the
            engine does not report it.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int | None = None


#: Finish reasons of answers on which the engine or the gateway failed; see `Outcome`.
FAILED_FINISH_REASONS = ("engine_lost", "error")


class Outcome(NamedTuple):
    """The end of a request.

    Attributes:
        status: The HTTP status that was sent, 0 if no response was sent.
        finish: The finish reason of the first choice, or `cancelled`, `engine_lost` or `error`;
            empty if no text was generated and the request did not fail.
        usage: The tokens that were used, None if no tokens were used.
    """

    status: int
    finish: str = ""
    usage: Usage | None = None

    @property
    def is_billed(self) -> bool:
        """Return False if no tokens were used, or if the request failed before its first token."""
        usage = self.usage
        return usage is not None and (usage.completion_tokens > 0 or self.finish not in FAILED_FINISH_REASONS)


class UsageEvent(NamedTuple):
    """A billed request, as outboxes, Kafka topics and the ledger store it.

    Outboxes outlive an upgrade, so new fields must be at the end and have a default.

    Attributes:
        id: A UUID that sorts by time. The ledger counts an event once per id.
        gateway_id: The id of the gateway.
        seq: The number of the event at its gateway, from 0.
        at: The time of the request.
        request_id: The id of the request.
        tenant_id: The tenant, empty without API keys.
        user_id: The user.
        key_id: The id of the API key.
        model: The name of the model.
        input_tokens: The number of tokens in the prompt, including `cached_tokens`.
        cached_tokens: The number of prompt tokens that the engine found in its cache.
        output_tokens: The number of generated tokens, including `reasoning_tokens`.
        reasoning_tokens: The number of generated tokens that are reasoning.
        cost_micros: The price in micro-dollars, according to `price_id`.
        price_id: The id of the price. Without it, the ledger looks the price up.
        status: The HTTP status: 499 if the client disconnected, 0 with the `finish_reason`
            `gateway_lost` if the gateway was lost.
        finish_reason: The finish reason of the first choice, or the reason of a failure.
        ttft_ms: The milliseconds until the first token.
        latency_ms: The milliseconds until the end.
        priority: The priority of the key.
        version: The version of the model.
        replica: The id of the last replica.
        migrations: The number of failovers to other replicas.
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
    """A recorder of a request's usage, whose records outlive the process.

    No method raises or waits.
    """

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
            prompt_tokens: The number of tokens in all prompts.
            event_id: The id of the usage event, if another gateway began the answer.
            known_tokens: The number of tokens that the other gateway generated. `count` does not
                include them.
        """

    @abstractmethod
    def cached(self, tokens: int) -> None:
        """Record the number of prompt tokens that the engine found in its cache."""

    @abstractmethod
    def count(self, tokens: int) -> None:
        """Record the number of tokens generated so far."""

    @abstractmethod
    def end(self, outcome: Outcome, first: float = 0.0, replica: str = "", moves: int = 0) -> None:
        """Record the end of the request, before the last bytes of the response are sent.

        Only the first call counts.

        Args:
            outcome: The end of the request.
            first: The time of `perf_counter()` at the first tokens, 0 without tokens.
            replica: The id of the last replica.
            moves: The number of failovers to other replicas.
        """

    @abstractmethod
    def hold(self) -> None:
        """Delay the record of the end until `settle`.

        Another gateway may take the answer over meanwhile, and bill it.
        """

    @abstractmethod
    def settle(self, owner: UsageOwner) -> None:
        """Write the record of the end, or leave the bill to another gateway.

        Args:
            owner: The gateway that bills the answer.
        """


def shared_answer_id(owner: str, answer_id: str) -> str:
    """Return the id under which gateways share an answer of `owner`.

    The id contains the owner, because clients can choose ids and two owners may choose the same id.
    """
    return f"{owner}:{answer_id}"


class UsageOwner(Enum):
    """The gateway that bills an answer which several gateways generated.

    HERE: this gateway bills the whole answer. ELSEWHERE: another gateway has taken the answer over
    and bills the whole answer. OFFERED: any gateway may take the answer over, and until then the
    record on this gateway's disk is the only record.
    """

    HERE = 1
    ELSEWHERE = 2
    OFFERED = 3


class QuotaReservation(ABC):
    """The part of a caller's quotas that a request holds.

    The quota is reserved before the work and settled when the request ends.
    """

    @property
    @abstractmethod
    def reserved_tokens(self) -> int:
        """Return the number of tokens reserved for prompt and answers.

        The number is 0 if no quota limits tokens.
        """

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
            model: The model's name. If empty, the tokens are not billed or settled: they count and
                cost nothing, but an exhausted budget rejects them.
            prompt: The number of tokens in the prompt. Without tokens, only the request is
                counted.
            most: The maximum number of tokens in all answers together.
            answers: The number of answers.
            bounded: True if the client set `most`. Otherwise, the usual length of the model's
                answers is reserved.
            known: The number of tokens that a lost gateway has reserved for the same request, and
                which are not reserved again.

        Returns:
            The number of answer tokens granted, which is less than `most` if the budget pays for
            less.

        Raises:
            RateLimitError: A limit is reached.
        """

    @abstractmethod
    def follow(self, usage: Callable[[], Usage]) -> None:
        """Update the reservation from now on with the usage of a running answer.

        Args:
            usage: Returns the usage of the answer so far.
        """

    @abstractmethod
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Return the response headers that describe the caller's limits."""

    @abstractmethod
    def hand_over(self, is_taken: bool = True) -> None:
        """Leave the reserved tokens to the gateway that takes the answer over and settles them.

        If no gateway has taken the answer yet, its money stays held until this process is gone.
        """

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Settle the reservation with the usage in `outcome`."""


class SchedulingParams(NamedTuple):
    """The attributes that determine a request's place in queues.

    Attributes:
        tenant: The path of the caller's fair share of the replicas.
        tier: The name of the priority tier.
        arrived: The time of `perf_counter()` at the request's arrival.
        deadline: The time of `perf_counter()` at which the first token is due.
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
        level: The model's level of degradation, above 0.
        max_tokens: The maximum number of tokens in the answer.
        prompt_tokens: The maximum number of tokens in the prompt, None for no limit.
        is_shed: True if the request is rejected.
    """

    level: int
    max_tokens: int
    prompt_tokens: int | None = None
    is_shed: bool = False


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A validated, tokenized request, with the fields of the tensor contract (docs/contract.md).

    Attributes:
        request_id: The id of the request, which the engine's server receives too.
        input_ids: The token ids of the prompt.
        max_tokens: The maximum number of tokens in each answer.
        sampling: The sampling parameters.
        n: The number of answers.
        min_tokens: The minimum number of tokens in each answer.
        end_ids: The token ids that end a sequence. Without any, only `max_tokens` ends it.
        stop_words: The token sequences that end a sequence.
        bad_words: The token sequences that must not be generated.
        logprobs: True if the log-probability of each token is requested.
        top_logprobs: The number of alternatives per token.
        prompt_logprobs: The number of alternatives per prompt token, None for no log-probabilities.
        guide: The grammar of the output, None for free text.
        caller: The value of `Caller.share`, for fair turns among requests with grammars that are
            new to the engine.
        cache_salt: A number; requests share cached prefixes only if their salts are equal.
        cache_key: The client's name for requests that share a prefix, empty without a name.
        extras: Values of the contract's inputs that have no field here. Engine models of other
            makers do not receive all of them.
        streaming: True if the engine sends tokens as they are generated.
        turn: The attributes that determine the request's place in queues.
        without: The ids of replicas that must not receive the request.
        moved: True if the request has started on a replica that could not finish it.
        whole: True if the client sees the answer only when it is complete, so that the answer may
            start again.
        trace: The `traceparent` header of W3C for the engine's server, empty if the request is not
            traced.
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


#: The most likely tokens at a position with their log-probabilities, the likeliest first.
TopLogprobs = Sequence[tuple[int, float]]


class TokenBatch(NamedTuple):
    """New tokens of one sequence of a request, in order.

    Attributes:
        sequence: The index of the sequence, from 0 to n-1.
        tokens: The token ids.
        logprobs: The natural logarithm of each token's probability, if requested.
        restarts: True if the sequence starts again, so that its earlier tokens do not count. Only
            for requests with `whole`.
        tops: The alternatives of each token, if requested.
        prompt: The alternatives of each prompt token except the first, if requested. Sent with the
            first tokens of the request.
    """

    sequence: int
    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None
    restarts: bool = False
    tops: Sequence[TopLogprobs] | None = None
    prompt: Sequence[TopLogprobs] | None = None


TokenSink = Callable[[TokenBatch], bool]


class Failover(NamedTuple):
    """A failover of an answer, or of one sequence of an answer, to another replica.

    Attributes:
        reason: The reason why the answer left its replica.
        left: The id of the replica that the answer left.
        to: The id of the replica that continues the answer, empty if several parts moved.
        began: The time of `perf_counter()` at the start of the search for a replica.
        ended: The time of `perf_counter()` at the end of the search.
    """

    reason: str
    left: str
    to: str
    began: float
    ended: float


class TokenStream(ABC):
    """The tokens of a request, as they arrive.

    The iteration ends after the engine's final response. It raises EngineError if the engine fails,
    UnsupportedError if the engine rejects the request, UnavailableError if Triton cannot be
    reached, and CancelledStreamError after `cancel`.

    Attributes:
        cached_tokens: The number of prompt tokens in the engine's cache, None before the first
            token or if unknown.
        ended: The indexes of the sequences that have ended, if there are several.
        replica: The id of the current replica, empty if there is only one server.
        version: The version of the model that generates, empty for a model without versions.
        moves: All failovers to other replicas, in order.
        splices: The number of failovers after which the text is the same (`exact`) or may differ
            (`approximate`).
        is_failing_over: True during the search for another replica, when silence is not a time-out.
    """

    cached_tokens: int | None = None
    ended: Collection[int] = frozenset()
    replica: str = ""
    version: str = ""
    moves: Sequence[Failover] = ()
    splices: Mapping[str, int] = MappingProxyType({})
    is_failing_over: bool = False

    def beginning(self) -> Sequence[int]:
        """Return the tokens of the first sequence so far, if the stream keeps them."""
        return ()

    def __aiter__(self) -> TokenStream:
        return self

    @abstractmethod
    async def __anext__(self) -> TokenBatch: ...

    def attach(self, sink: TokenSink, taken: list[TokenBatch] | None = None) -> None:
        """Offer batches to `sink` directly while the reader waits in `__anext__`.

        By default, the reader receives all batches.

        Args:
            sink: Returns False for a batch that the reader must receive. The reader also receives
                exceptions of `sink`.
            taken: Collects the batches that `sink` accepted.
        """
        return

    @abstractmethod
    def cancel(self) -> None:
        """Remove the request from the engine's batch immediately.

        Further calls, and calls after the end, have no effect.
        """


class Engine(ABC):
    """A model that turns EngineRequests into TokenStreams.

    Attributes:
        gated: True if requests may wait or be rejected before they are sent.
    """

    gated = False

    def check(self, turn: SchedulingParams) -> None:
        """Check, before a request is prepared, that it would not wait too long.

        Raises:
            UnavailableError: The request would wait too long.
        """
        return

    def has_waiting(self, turn: SchedulingParams) -> bool:
        """Return True if requests of the same tenant are waiting."""
        return False

    @abstractmethod
    async def open(self, request: EngineRequest) -> TokenStream:
        """Submit a request. A gated engine may wait for a replica."""

    async def close(self) -> None:
        """Release the engine's resources. Open streams end with UnavailableError."""
        return


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of an engine beyond the basic contract.

    A request that needs an absent feature is rejected with status 400. docs/contract.md describes
    each feature.
    """

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

    docs/contract.md describes all fields.

    Attributes:
        max_seq_len: The context length, in tokens.
        state: True if the step stream reports the engine's state.
        kv_events: True if the step stream reports changes of the KV cache.
        cached_tokens: True if the step stream reports the cached tokens of prompts.
        batch_invariant: True if an answer does not depend on other requests in its batch.
        engine: A digest of the engine. Replicas with equal digests can replace each other.
        tokenizer: A digest of the tokenizer.
        template: A digest of the chat template.
        built: The Unix time at which the engine was built, in seconds.
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


ReplicaState = Literal["starting", "ready", "draining", "suspect", "gone"]
#: The source of a replica's state: `reported` by the replica, or `measured` from the gateway's own
#: streams and the server's metrics.
ReplicaSource = Literal["reported", "measured"]


@dataclass(slots=True)
class ReplicaView:
    """A gateway's view of a model on one server.

    Attributes:
        replica_id: HOST:PORT of the server, with the engine model if the settings name one.
        model: The name under which the model is served.
        version: The version that the engine reports.
        state: The state of the replica; requests may be sent to a `ready` replica (see
            `HealthCheck`).
        running: The number of sequences in the engine's batch.
        waiting: The number of sequences in the engine's own queue.
        waiting_tokens: The number of prompt tokens of the waiting sequences that are not computed
            yet.
        free_blocks: The number of blocks of the KV cache that no running sequence holds. They may
            contain cached prefixes.
        blocks: The number of all blocks of the KV cache, 0 while unknown.
        tokens_per_block: The number of tokens per block.
        prefill_rate: The number of prompt tokens computed per second, 0 while unknown.
        step_seconds: The mean duration of the latest steps, 0 while unknown.
        max_batch_size: The maximum number of sequences in a batch, 0 while unknown.
        in_flight: The number of requests that this gateway has sent and that the replica's state
            does not include yet.
        in_flight_tokens: The number of uncached prompt tokens of the in-flight requests.
        subscribers: The number of gateways that use the replica.
        demand: The sum of the weights that all gateways declare (`TieredQueue.demand`), including
            this gateway.
        adapters: The names of the loaded LoRA adapters.
        source: The source of the state: the replica's reports or the gateway's measurements.
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
        """Return the number of sequences that the replica has or is about to receive."""
        return self.running + self.waiting + self.in_flight


@dataclass(slots=True, eq=False)
class RoutingRequest:
    """The properties of a request that the choice of a replica depends on.

    Attributes:
        tokens: The number of tokens in the prompt.
        ids: The token ids of the prompt as the engine receives them, as INT32.
        answer: The expected number of output tokens.
        salt: The number that separates the cached prefixes of tenants, 0 if tenants share them.
        adapter: The name of the LoRA adapter, empty without an adapter.
        without: The ids of replicas that failed on this request.
        hashes: The hashes of the prompt's blocks, None if they are not known yet.
        affinity: The hash of the client's cache key, None without a key. Requests with equal hashes
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
    """An interface to the choice of a replica for a request.

    A policy has no clock and does not wait.
    """

    def choose(self, request: RoutingRequest, views: Sequence[ReplicaView]) -> int | None:
        """Return the index of a view, or None if no replica can take the request."""
        ...

    def cached(self, request: RoutingRequest, view: ReplicaView) -> int:
        """Return the number of prompt tokens that the replica has probably cached."""
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
        """Assume that a replica keeps only the `blocks` most recently used blocks.

        Used for a replica that reports no evictions.
        """
        ...

    def forget(self, replica_id: str) -> None:
        """Record that a replica's cache is empty, or that the replica does not exist any longer."""
        ...


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits for a replica.

    Times are in seconds of the clock that the queue is called with.

    Attributes:
        tenant: The tenant whose fair share the request uses.
        routing: The properties that the choice of a replica depends on.
        arrived: The time of arrival.
        tier: The name of the priority tier.
        weight: The weight of the tenant.
        deadline: The latest time of the first token.
        client_deadline: The deadline that the client asked for.
        bytes: The bytes that the request holds while it waits.
        home: The id of the replica that was best on arrival. Only this replica may receive the
            request until `home_until`.
        home_until: The time after which any replica may receive the request.
        moved: True after a failover. The request then precedes other requests of its tenant.
        uncached_tokens: The number of prompt tokens to compute on the replica that the request was
            dispatched to.
        payload: Any object of the queue's user.
    """

    tenant: str
    routing: RoutingRequest
    arrived: float
    tier: str = ""
    weight: float = 1.0
    deadline: float = math.inf
    client_deadline: float = math.inf
    bytes: int = 0
    home: str = ""
    home_until: float = 0.0
    moved: bool = False
    uncached_tokens: int = 0
    payload: Any = None

    @property
    def size(self) -> int:
        """Return the number of tokens that the request needs: prompt and expected output."""
        return self.routing.tokens + self.routing.answer


class ReplicaCapacity(NamedTuple):
    """The requests that a replica can accept.

    Attributes:
        tokens: The number of tokens of prompt and output that fit.
        replica_id: The id of the replica. Among equal requests, those whose home is this replica
            come first.
        accepts: Returns True for requests that the replica can serve. None if it can serve all.
        must_yield: Returns True for requests that must leave the slot to others. None if no request
            must.
    """

    tokens: float = math.inf
    replica_id: str = ""
    accepts: Callable[[QueuedRequest], bool] | None = None
    must_yield: Callable[[QueuedRequest], bool] | None = None
