"""The state that all endpoints share, and the admission and submission of generation requests."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from llmops.gateway.errors import (
    OVERLOADED,
    ApiError,
    ClientDeadlineError,
    ModelNotFoundError,
    OverloadedError,
    UnavailableError,
)
from llmops.gateway.generation.answer import Answer, TokenCallback
from llmops.gateway.generation.choice import MAX_LOGPROBS, Choice, LogprobBuffer
from llmops.gateway.http.request_body import BodyReader
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import DegradedLimits, Engine, EngineRequest, TokenStream
from llmops.gateway.routing.admission.degradation import FALL_SECONDS, Degradation
from llmops.gateway.routing.admission.rejected_clients import RETRY_AFTER_JITTER
from llmops.gateway.routing.admission.request_queue import DEFAULT_TIER_NAME
from llmops.gateway.routing.admission.slo_headers import FAIRNESS_SCOPE
from llmops.gateway.routing.auto_model import AutoModel
from llmops.gateway.routing.engine_slots import EngineSlots
from llmops.gateway.routing.failover import FailoverEngine
from llmops.gateway.routing.merged_stream import MergedStream
from llmops.gateway.routing.model_registry import ModelLookup
from llmops.gateway.routing.placement.prefix_index import tenant_cache_salt
from llmops.gateway.routing.providers import ProviderModel, Providers
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.routing.versions.version_router import VersionRouter
from llmops.gateway.safety.policy import Safety
from llmops.gateway.schemas.request_fields import SamplingFields
from llmops.gateway.settings import RequestLimits, Timeouts
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.metrics import AnswerMeter, GatewayMetrics, GoodputOutcome
from llmops.gateway.text.answer_features import describe_answer
from llmops.gateway.text.text_thread_pool import TextThreadPool
from llmops.gateway.text.tokenizer import TextTokenizer

#: Maximum number of tokens of a prompt and of an answer that are decoded for the judge of a
#: roll-out: enough to describe the answer's form.
DESCRIBED_TOKENS = 200
#: Values of `service_tier` that request the key's own tier, in OpenAI's and in Anthropic's API.
OWN_TIER = frozenset({"auto", "default", "standard_only"})
#: Maximum length of an end user's name in characters, beyond which the name is cut: OpenAI's
#: maximum for `safety_identifier`.
MAX_END_USER_LENGTH = 64


def apply_request_hints(body: object, context: RequestContext, tiers: Sequence[str]) -> bool:
    """Set the tier, the cache key and the end user of a request from its body.

    The end user is `safety_identifier`, its predecessor `user`, or Anthropic's `metadata.user_id`.
    The body is read before the model is chosen, because a saturated model accepts requests by their
    tiers.

    Args:
        body: The body of any API.
        context: The context of the request, which is changed.
        tiers: The tiers of the settings, the highest first.

    Returns:
        False if `service_tier` is ignored, because the tier does not exist or is above the key's
        tier. A tier above the key's also adds a warning.
    """
    # Only declared fields are here; the types of others are not checked.
    hints = vars(body)
    context.prompt_cache_key = hints.get("prompt_cache_key") or ""
    end_user = hints.get("safety_identifier") or hints.get("user") or getattr(hints.get("metadata"), "user_id", None)
    if end_user:
        # The end user's name is written to the log and the store, so it must be printable.
        context.end_user = "".join(char if char.isprintable() else "?" for char in end_user[:MAX_END_USER_LENGTH])
        if not context.fairness_id and FAIRNESS_SCOPE in context.caller.scopes:
            context.fairness_id = context.end_user
    wanted = hints.get("service_tier")
    if wanted is None or wanted in OWN_TIER:
        return True
    if wanted not in tiers:
        return False
    own = context.caller.tier or DEFAULT_TIER_NAME
    # A tier that the settings do not describe is served as the default tier, or as the last tier.
    rank = next((tiers.index(name) for name in (own, DEFAULT_TIER_NAME) if name in tiers), len(tiers) - 1)
    if tiers.index(wanted) < rank:
        context.warnings.append(f"The tier of this key is {tiers[rank]}; service_tier cannot ask for a higher one.")
        return False
    context.service_tier = wanted
    context.caller = replace(context.caller, tier=wanted)
    return True


@dataclass(frozen=True, slots=True)
class AppState:
    """The state that every endpoint receives."""

    models: ModelLookup[GenerativeModel]
    limits: RequestLimits
    timeouts: Timeouts
    metrics: GatewayMetrics
    text_threads: TextThreadPool
    intake: BodyReader
    engine_slots: EngineSlots
    # Maximum tokens of an answer whose request sets no maximum; None for the rest of the context
    # window.
    default_tokens: int | None = None
    # True if requests with unknown fields are refused.
    strict_fields: bool = False
    # True if only callers of the same tenant share cached prefixes.
    tenants_apart: bool = False
    # True if certain blocks of agents' prompts are left out: they differ in each session, and would
    # keep the rest of the prompt from being found in the cache.
    drop_session_blocks: bool = True
    # Tiers of requests, the highest first.
    tiers: tuple[str, ...] = ()
    # Chooses among the versions of a model; None if models have one version.
    version_router: VersionRouter | None = None
    # Filters of prompts and answers; None without filters.
    safety: Safety | None = None
    # Restrictions while a model is saturated; None without restrictions.
    degradation: Degradation | None = None
    # Aliases that choose a model for each request; None without such aliases.
    auto_model: AutoModel | None = None
    # Other servers, which answer chats when the models of an alias are full.
    providers: Providers = field(default_factory=Providers)

    async def find_model(
        self, name: str, context: RequestContext, body: object, *, overflow: bool = False
    ) -> GenerativeModel:
        """Return the version of the model that answers a request for `name`.

        The tier, the cache key and the end user are first set from the body.

        For an alias, the result is the first of its models that is served and has room, in the
        order that suits the request; the last model is taken even without room.

        Args:
            name: The name of a model or an alias.
            context: The context of the request.
            body: The request's body. Requests of one conversation stay on one version.
            overflow: True if a ProviderModel may answer.

        Raises:
            InvalidRequestError: The request asks for an unknown quality.
            ModelNotAllowedError, ModelNotFoundError, UnavailableError: `ModelLookup.get` raised the
                error.
        """
        if not apply_request_hints(body, context, self.tiers):
            context.ignored_fields.append("service_tier")
            self.metrics.ignored.labels("service_tier").inc()
        candidates = self.models.candidates(name, context.caller)
        provider_model = self.providers.find(name, context) if overflow and name in self.providers.models else None
        if self.auto_model is None or name not in self.auto_model.aliases:
            return self._first_with_room(name, candidates, body, context, provider_model)
        decision = await self.auto_model.choose(name, body, context)
        allowed = [model for model in decision.models if model in candidates] or candidates
        model = self._first_with_room(name, allowed, body, context, provider_model)
        context.alias_of = model.name
        self.auto_model.record(name, model.name, body, context)
        context.route_reason = decision.reason if model.name == decision.models[0] else "fallback"
        self.metrics.numbers(metric_definitions.ROUTED).labels(name, model.name, context.route_reason).inc()
        if decision.reason == "degraded":
            self.count_degraded(model.name, "small_model")
        return model

    def _first_with_room(
        self,
        name: str,
        candidates: Sequence[str],
        body: object,
        context: RequestContext,
        provider_model: ProviderModel | None = None,
    ) -> GenerativeModel:
        for one in candidates if provider_model is not None else candidates[:-1]:
            with suppress(UnavailableError, ModelNotFoundError):
                if not self.models.is_ready(one):
                    continue
                model = self.models.find(one)
                if self.version_router is not None:
                    model = self.version_router.route(model, body, context)
                if self._sheds(model, context):
                    continue
                if model.engine.gated:
                    model.engine.check(context.scheduling)
                self.engine_slots.enter(model, 1, context.caller.share)()
                context.alias_of = model.name
                return model
        if provider_model is not None:
            context.alias_of = provider_model.name
            return provider_model
        last = candidates[-1]
        model = self.models.find(last)
        if self.version_router is not None:
            model = self.version_router.route(model, body, context)
        context.alias_of = model.name if name != model.name and model.name == last else ""
        return model

    def _sheds(self, model: GenerativeModel, context: RequestContext) -> bool:
        """Return True if degraded mode rejects the caller's tier."""
        if self.degradation is None:
            return False
        limits = _degraded_limits(self.degradation, model, context)
        return limits is not None and limits.is_shed

    def count_degraded(self, model: str, effect: str) -> None:
        """Count a request that degraded mode changed or rejected."""
        self.metrics.numbers(metric_definitions.DEGRADED_REQUESTS).labels(model, effect).inc()

    def cache_salt(self, caller: str) -> int:
        """Return the salt that separates a caller's cached prefixes from other tenants' prefixes.

        The salt is 0 if tenants share their prefixes.
        """
        return tenant_cache_salt(caller.partition("/")[0]) if self.tenants_apart else 0


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """The known part of an answer that another gateway began.

    Attributes:
        batches: The tokens, in the batches in which they arrived.
        max_tokens: The maximum number of tokens of the whole answer.
        cached_tokens: Tokens of the prompt that were in the cache of the answer's first replica.
        event_id: The id of the usage event; empty if the answer is not billed.
    """

    batches: Sequence[Sequence[int]]
    max_tokens: int
    cached_tokens: int | None = None
    event_id: str = ""

    @property
    def tokens(self) -> list[int]:
        """Return the tokens as one list."""
        return [token for batch in self.batches for token in batch]


B = TypeVar("B", bound=SamplingFields)


@dataclass
class Generation(Generic[B]):
    """A request for generated text on its way to the engine.

    Attributes:
        state: The gateway's state.
        body: The request, which has passed the checks of its API.
        model: The model that answers.
        answer_id: The id of the answer.
        context: The context of the request.
    """

    state: AppState
    body: B
    model: GenerativeModel
    answer_id: str
    context: RequestContext
    _meter: AnswerMeter = field(init=False)
    _release_slots: Callable[[], None] | None = field(init=False, default=None)

    @contextmanager
    def admitted(self, sequences: int) -> Iterator[None]:
        """Reserve slots for the answer that is started in the body of the `with` statement.

        If the body raises an error, the slots are released and the error is counted.

        Args:
            sequences: The number of slots that the request needs.

        Raises:
            UnavailableError: Too many requests are waiting.
        """
        state, model, context = self.state, self.model, self.context
        self._meter = context.meter = AnswerMeter(state.metrics.model(model.name), context.started, context.caller.tier)
        context.model = model.name
        try:
            if state.degradation is not None:
                self._degrade(state.degradation)
            if model.engine.gated:
                model.engine.check(context.scheduling)
            self._release_slots = state.engine_slots.enter(model, sequences, context.caller.share)
            yield
        except BaseException as error:
            if self._release_slots is not None:
                self._release_slots()
            self._meter.refused(_failure_outcome(error))
            raise

    async def submit(
        self,
        requests: Sequence[EngineRequest],
        make_choice: Callable[[int], Choice],
        on_tokens: TokenCallback | None = None,
    ) -> Answer:
        """Submit engine requests and return their answer.

        Args:
            requests: The engine requests, one for each prompt.
            make_choice: Makes the choice with the given number; called for each sequence of each
                request.
            on_tokens: Called with the tokens of each batch that is read from the stream.
        """
        state, model, context = self.state, self.model, self.context
        prompt_tokens = sum(len(request.input_ids) for request in requests)
        choices = [make_choice(index) for index in range(len(requests) * requests[0].n)]
        if len(requests) == 1:
            stream = await model.engine.open(requests[0])
        else:
            stream = await _open_merged(model.engine, requests)
        context.version = stream.version
        if state.version_router is not None and state.version_router.is_judged(model.parent or model.name):
            context.describe_answer = partial(_describe_answer, model.tokenizer, requests[0].input_ids, stream)
        context.mark("submit")
        more = make_choice if requests[0].whole else None
        return self.answer(Answer, stream, choices, prompt_tokens, make_choice=more, on_tokens=on_tokens)

    def resume(self, request: EngineRequest, choice: Choice, begun: BegunAnswer, on_tokens: TokenCallback) -> Answer:
        """Return the rest of an answer that a lost gateway began.

        Args:
            request: The engine request of the whole answer.
            choice: The choice, which has the known tokens already.
            begun: The known part of the answer.
            on_tokens: Called with the tokens of each batch.
        """
        engine = self.model.engine
        if not isinstance(engine, FailoverEngine):
            count = self.state.metrics.numbers(metric_definitions.FAILOVERS)
            # A single server has no streams that leave their replica, so the silence timeout is
            # infinite.
            exact = self.model.card.batch_invariant
            engine = FailoverEngine(engine, lambda reason: count.labels(reason).inc(), exact=exact, silence=math.inf)
        stream = engine.continue_stream(request, array("i", begun.tokens), begun.cached_tokens)
        self.context.version = stream.version
        return self.answer(Answer, stream, [choice], len(request.input_ids), begun=begun, on_tokens=on_tokens)

    def answer(
        self,
        kind: type[Answer],
        stream: TokenStream,
        choices: list[Choice],
        prompt_tokens: int,
        *,
        begun: BegunAnswer | None = None,
        make_choice: Callable[[int], Choice] | None = None,
        on_tokens: TokenCallback | None = None,
    ) -> Answer:
        """Return the running answer, which records its usage and releases the slots at its end.

        Args:
            kind: The class of the answer.
            stream: The stream of the engine's tokens.
            choices: The choices by the number of their sequence.
            prompt_tokens: Tokens of all prompts.
            begun: The known part of an answer that another gateway began.
            make_choice: Makes the choice with the given number; see Answer.
            on_tokens: Called with each batch of tokens.
        """
        assert self._release_slots is not None
        context = self.context
        # The gateway that began the answer counted its prompt.
        self._meter.submitted(0 if begun else prompt_tokens, len(choices))
        if context.usage_recorder is not None:
            event_id, known = (begun.event_id, choices[0].completion_tokens) if begun else ("", 0)
            context.usage_recorder.begin(
                self.model.name, self.answer_id, prompt_tokens, event_id=event_id, known_tokens=known
            )
        return kind(
            stream,
            choices,
            meter=self._meter,
            timeouts=self.state.timeouts,
            prompt_tokens=prompt_tokens,
            release_slots=self._release_slots,
            context=context,
            make_choice=make_choice,
            on_tokens=on_tokens,
        )

    def logprob_buffer(self, choices: int) -> LogprobBuffer:
        """Return a buffer for the log-probabilities of one of `choices` choices.

        The memory of the buffer counts as memory of the request.
        """

        def hold(size: int) -> bool:
            try:
                self.state.intake.hold(size, self.context)
            except UnavailableError:
                return False
            return True

        most = None if self.body.stream else MAX_LOGPROBS // choices
        return LogprobBuffer(self.model.tokenizer.detokenizers.token_bytes, most, hold)

    def limit_degraded(self, limits: DegradedLimits, prompt_tokens: int, max_tokens: int) -> int:
        """Return the maximum tokens of an answer in degraded mode.

        Args:
            limits: The restrictions of degraded mode.
            prompt_tokens: Tokens of its prompt.
            max_tokens: The maximum tokens of the answer outside degraded mode.

        Raises:
            OverloadedError: The prompt is too long for degraded mode.
        """
        name = self.model.name
        if limits.prompt_tokens is not None and prompt_tokens > limits.prompt_tokens:
            self.state.count_degraded(name, "prompt_tokens")
            raise OverloadedError(
                f"The model {name} is overloaded and takes prompts of at most {limits.prompt_tokens} tokens now; "
                f"this one has {prompt_tokens}. Shorten it, or retry later.",
                retry_after=degraded_retry_after(),
            )
        most = max(limits.max_tokens, self.body.min_tokens or 0)
        if max_tokens > most:
            self.state.count_degraded(name, "max_tokens")
        return min(max_tokens, most)

    def _degrade(self, degradation: Degradation) -> None:
        """Set the restrictions of degraded mode.

        Raises:
            OverloadedError: Degraded mode rejects requests of this tier.
        """
        self.context.degraded = limits = _degraded_limits(degradation, self.model, self.context)
        if limits is not None and limits.is_shed:
            self.state.count_degraded(self.model.name, "shed")
            raise OverloadedError(
                f"The model {self.model.name} is overloaded and serves only requests of the tier "
                f"{degradation.rules.first_tier} now. Retry later.",
                retry_after=degraded_retry_after(),
            )


def _degraded_limits(
    degradation: Degradation, model: GenerativeModel, context: RequestContext
) -> DegradedLimits | None:
    has_waiting = partial(model.engine.has_waiting, context.scheduling)
    return degradation.limits(model.parent or model.name, context.caller.tier, has_waiting)


def degraded_retry_after() -> float:
    """Return the Retry-After in seconds, with jitter, of a request that degraded mode rejects."""
    return FALL_SECONDS * random.uniform(*RETRY_AFTER_JITTER)


def _failure_outcome(error: BaseException) -> GoodputOutcome | None:
    """Return the outcome of a request that failed before generation began.

    Return None if the request itself was invalid, or came too late by its client's own deadline
    only: clients must not decide what counts as an objective that was missed.
    """
    if isinstance(error, ClientDeadlineError):
        return None
    if isinstance(error, ApiError):
        return "shed" if error.code == OVERLOADED else "failed" if error.status >= 500 else None
    return "failed" if isinstance(error, Exception) else "aborted"


def _describe_answer(tokenizer: TextTokenizer, prompt: Sequence[int], stream: TokenStream) -> Mapping[str, bool]:
    """Return the features of an answer, from its first tokens and the end of its prompt.

    The result is empty for an answer without tokens.
    """
    ids = list(stream.beginning()[:DESCRIBED_TOKENS])
    if not ids:
        return {}
    return describe_answer(tokenizer.decode(list(prompt[-DESCRIBED_TOKENS:])), tokenizer.decode(ids))._asdict()


async def _open_merged(engine: Engine, requests: Sequence[EngineRequest]) -> TokenStream:
    """Return one stream for all requests, each of which has n sequences.

    Sequence s of request r becomes sequence r * n + s of the stream.
    """
    streams: list[TokenStream] = []
    try:
        for request in requests:
            streams.append(await engine.open(request))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return MergedStream(streams, range(0, len(streams) * requests[0].n, requests[0].n))
