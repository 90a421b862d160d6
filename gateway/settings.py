"""The gateway's settings.

Command-line flags override environment variables (LLMOPS_…), which override the YAML file.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ImportString,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict, SettingsError

from llmops.errors import InputError
from llmops.gateway.replica_address import parse_replica
from llmops.objectives import AVAILABILITY, PERCENTILES, Objective, parse_share
from llmops.units import Seconds
from llmops.urls import http_url_problem, is_secure_url
from llmops.validation_errors import error_path, explain_first_error
from llmops.yaml_files import read_yaml

#: Prefix of environment variables. A double underscore separates a section from a setting in it:
#: LLMOPS_TIMEOUTS__IDLE.
PREFIX = "LLMOPS_"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _above_zero(duration: Seconds) -> Seconds:
    if not duration:
        raise ValueError("it must be above zero, such as 500ms or 0.5s")
    return duration


def _check_variable_name(name: str) -> str:
    """Raise ValueError without quoting the text, which may be the key itself."""
    if not name.replace("_", "").isalnum():
        raise ValueError("write the name of an environment variable that holds the key, and not the key")
    return name


def _refuse_special(path: Path) -> Path:
    """Refuse pipes, whose opening waits until another process writes, and devices, which may have no end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file; name one, or a link to one")
    return path


#: A file that the gateway reads at its start.
_File = Annotated[Path, AfterValidator(_refuse_special)]
_VariableName = Annotated[str, AfterValidator(_check_variable_name)]
_PositiveDuration = Annotated[Seconds, AfterValidator(_above_zero)]


class Objectives(_Section):
    """Service-level objectives. None is no objective.

    A latency objective at p95 must be met by 95 of 100 answers. TTFT is the time from the request's
    arrival to the first token, TPOT the mean time per token after it, and E2E the time to the last
    token.

    Attributes:
        availability: The fraction of requests, such as 99.9%, that must be neither rejected for
            lack of capacity nor fail.
    """

    ttft_p50: _PositiveDuration | None = None
    ttft_p95: _PositiveDuration | None = None
    ttft_p99: _PositiveDuration | None = None
    tpot_p50: _PositiveDuration | None = None
    tpot_p95: _PositiveDuration | None = None
    tpot_p99: _PositiveDuration | None = None
    e2e_p50: _PositiveDuration | None = None
    e2e_p95: _PositiveDuration | None = None
    e2e_p99: _PositiveDuration | None = None
    availability: Annotated[float, BeforeValidator(parse_share, json_schema_input_type=float | str)] | None = None

    def listed(self) -> list[Objective]:
        """Return the objectives that are set."""
        names = ((metric, share) for metric in ("ttft", "tpot", "e2e") for share in PERCENTILES)
        limits = ((metric, share, getattr(self, f"{metric}_p{share}")) for metric, share in names)
        found = [Objective(metric, limit, share / 100) for metric, share, limit in limits if limit is not None]
        return found if self.availability is None else [*found, Objective(AVAILABILITY, share=self.availability)]

    def limits(self, metric: str) -> dict[int, float]:
        """Return the limits of a latency in seconds, by percentile."""
        return {round(100 * (one.share or 0)): one.seconds for one in self.listed() if one.metric == metric}


class SloSettings(Objectives):
    """The objectives of a model.

    Attributes:
        tiers: The objectives of tiers. Each overrides the model's objectives.
    """

    tiers: dict[str, Objectives] = Field(default_factory=dict)


class TierSettings(_Section):
    """Scheduling of a tier under load. Tiers that are listed before others are served first.

    Attributes:
        weight: The weight of each waiting tenant when several gateways share a replica.
        share: The minimum fraction of all tokens while the tier has waiting requests.
        max_wait: The maximum time to the first token; requests that would wait longer are rejected.
            None: 0.6 of the objective for the first token (p95) in the first tier and in tiers with
            their own objectives, 60 s in other tiers.
    """

    weight: Annotated[float, Field(gt=0)] = 1.0
    share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    max_wait: _PositiveDuration | None = None


class QueueSettings(_Section):
    """Limits on the requests of a model that wait in this gateway.

    Attributes:
        entries: The maximum number of waiting requests.
        bytes: The maximum memory of the waiting requests, in bytes.
    """

    entries: Annotated[int, Field(gt=0)] = 4096
    bytes: Annotated[int, Field(gt=0)] = 256 * 2**20


class DegradedSettings(_Section):
    """Restrictions on a saturated model in degraded mode, level by level.

    Attributes:
        max_tokens: Level 1: the maximum number of tokens in an answer.
        prompt_tokens: Level 3: the maximum number of tokens in a prompt of callers below the first
            tier.
        file: A file with a level (0 to 4), or with levels by model, which overrides the automatic
            levels. The file is read again when it changes.
    """

    max_tokens: Annotated[int, Field(gt=0)] = 1024
    prompt_tokens: Annotated[int, Field(gt=0)] = 8192
    file: Path | None = None


class ModelOverrides(_Section):
    """Settings of a model, most of which override the model's metadata.

    A model without metadata (not created by `llmops repo`) needs `tokenizer_dir`, `max_seq_len`,
    `vocab_size` and `end_ids`, and `engine_model` if its Triton model is not called
    NAME-tensorrt_llm.

    Attributes:
        engine_model: The name of the Triton model.
        tokenizer_dir: The folder of the tokenizer.
        max_seq_len: The context length, in tokens.
        vocab_size: The number of token ids.
        end_ids: The token ids that end an answer.
        pad_id: The token id of padding.
        bos_id: The token id of the beginning of a text.
        target: The name of the build target.
        sampling: Sampling defaults, by parameter.
        capabilities: Features of the engine (docs/contract.md), by name.
        control_tokens_in_messages: True if text such as `<|im_end|>` in a message becomes the
            token.
        slo: The objectives of the model, which override the gateway's objectives.
    """

    engine_model: str | None = None
    tokenizer_dir: Path | None = None
    max_seq_len: int | None = None
    vocab_size: int | None = None
    end_ids: list[int] | None = None
    pad_id: int | None = None
    bos_id: int | None = None
    target: str | None = None
    sampling: dict[str, float] | None = None
    capabilities: dict[str, Any] | None = None
    control_tokens_in_messages: bool = False
    slo: SloSettings | None = None

    def metadata_fields(self) -> dict[str, Any]:
        """Return the overrides of metadata by name, without the gateway's own settings."""
        fields = self.model_dump(exclude_none=True, exclude={"engine_model", "control_tokens_in_messages", "slo"})
        return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}


class RoutedAlias(_Section):
    """An alias that selects one of two models for each request.

    Attributes:
        small: The model of plain requests.
        large: The model of requests with tools, a schema, code, or a long prompt.
        overflow: Models of providers, which answer when neither model has capacity.
        prompt_characters: The maximum length of a prompt for the small model, in characters.
        tiers: The model of all requests of a tier, by tier.
        head: A classifier that `llmops router train` wrote. It decides about all other requests.
    """

    small: str
    large: str
    overflow: list[str] = Field(default_factory=list)
    prompt_characters: Annotated[int, Field(gt=0)] = 8000
    tiers: dict[str, Literal["small", "large"]] = Field(default_factory=dict)
    head: _File | None = None

    @property
    def models(self) -> list[str]:
        """Return all models that the alias stands for."""
        return [self.small, self.large, *self.overflow]


class RequestLimits(_Section):
    """Limits that are checked before work starts, and limits on concurrent work in a gateway.

    Each limit is a maximum.

    Attributes:
        body_bytes: The size of a body, in bytes.
        json_values: The number of JSON values in a body. A key or a container counts as eight.
        held_bytes: The memory for the bodies of all requests that have not ended, in bytes.
        prompt_bytes: The size of all texts of a request that are tokenized, in bytes of UTF-8. Chat
            templates cannot make texts much larger than the maximum.
        queued: The number of sequences that wait for an engine's batch (`EngineSlots`).
        queued_inputs: The number of texts that wait for an encoder.
        header_bytes: The size of a request's header, in bytes.
        connections: The number of open connections.
        connections_per_client: The number of connections of an address (IPv6: a /64). None is half
            of `connections`, and 0 is no limit.
        messages: The number of messages in a request.
        stop_strings: The number of stop strings in a request.
        stop_length: The length of a stop string, in characters.
        stop_token_ids: The number of stop tokens in a request.
        tools: The number of tools in a request.
        schema_bytes: The size of a JSON Schema, in bytes.
        choices: The number of choices in a guided choice.
        prompts: The number of prompts in a completion request.
        inputs: The number of inputs in an embeddings request, or of documents in a rerank request.
        preparing: The number of requests that wait for a thread that renders and tokenizes.
        reads_per_second: The number of requests per second of a caller with methods other than
            POST; 0 is no limit.
        template_time: The CPU time to render a chat template.
    """

    body_bytes: Annotated[int, Field(gt=0)] = 16 * 2**20
    json_values: Annotated[int, Field(gt=0)] = 200_000
    held_bytes: Annotated[int, Field(gt=0)] = 256 * 2**20
    prompt_bytes: Annotated[int, Field(gt=0, le=6 * 2**20)] = 4 * 2**20
    queued: Annotated[int, Field(ge=0)] = 256
    queued_inputs: Annotated[int, Field(ge=0)] = 16_384
    header_bytes: Annotated[int, Field(ge=1024)] = 64 * 2**10
    connections: Annotated[int, Field(gt=0)] = 4096
    connections_per_client: Annotated[int, Field(ge=0)] | None = None
    messages: Annotated[int, Field(gt=0)] = 4096
    stop_strings: Annotated[int, Field(gt=0)] = 16
    stop_length: Annotated[int, Field(gt=0)] = 1024
    stop_token_ids: Annotated[int, Field(gt=0)] = 1024
    tools: Annotated[int, Field(gt=0)] = 128
    schema_bytes: Annotated[int, Field(gt=0)] = 65536
    choices: Annotated[int, Field(gt=0)] = 1024
    prompts: Annotated[int, Field(gt=0)] = 64
    inputs: Annotated[int, Field(gt=0)] = 2048
    preparing: Annotated[int, Field(gt=0)] = 1024
    reads_per_second: Annotated[float, Field(ge=0)] = 100.0
    template_time: _PositiveDuration = Seconds(1)


_QuotaLimit = Annotated[int, Field(gt=0, le=1_000_000_000)] | None


class QuotaSettings(_Section):
    """Limits on a caller, or on all callers together (see `Quotas`). None is no limit.

    Attributes:
        rpm: The maximum number of requests per minute.
        tpm: The maximum number of tokens per minute, of prompts and answers together.
        concurrent: The maximum number of requests at a time.
    """

    rpm: _QuotaLimit = None
    tpm: _QuotaLimit = None
    concurrent: _QuotaLimit = None


class Quotas(_Section):
    """Default quotas.

    Attributes:
        each: The quota of each caller without quotas of its own. A caller is a key or an address.
        all: The quota of all callers together.
        models: Additional quotas for a model, by its name, of each caller without quotas of its
            own. A key with limits is not bound by them.
        gateways: The number of gateways that may share `redis`. While Redis is away, each grants at
            most its part, also one that has not seen the others yet.
    """

    each: QuotaSettings = QuotaSettings()
    all: QuotaSettings = QuotaSettings()
    models: dict[str, QuotaSettings] = Field(default_factory=dict)
    gateways: Annotated[int, Field(ge=1)] = 2


class Timeouts(_Section):
    """Time-outs of engines and clients.

    Attributes:
        connect: The time to connect to Triton.
        first_token: The time to the first token, including the wait in the engine's queue.
        idle: The time between two messages of the engine.
        client: The time after which a client that does not read its response is disconnected.
        header: The time for a client to send a header.
        body: The time for a client to send a part of a body.
        connection: The time after which a connection without a request is closed.
        keepalive: The time after which a stream without events sends a comment, 0 for never.
        total: The time for a whole answer.
        drain: The time for running answers to end when the gateway shuts down.
    """

    connect: _PositiveDuration = Seconds(5)
    first_token: _PositiveDuration = Seconds(300)
    idle: _PositiveDuration = Seconds(60)
    client: _PositiveDuration = Seconds(60)
    header: _PositiveDuration = Seconds(20)
    body: _PositiveDuration = Seconds(30)
    connection: _PositiveDuration = Seconds(75)
    keepalive: Seconds = Seconds(10)
    total: _PositiveDuration = Seconds(3600)
    drain: Seconds = Seconds(30)


class QualitySettings(_Section):
    """Golden prompts, which are sent to every replica to detect wrong answers before users do.

    Attributes:
        interval: The time between two rounds of prompts. None sends no prompts.
        prompts: A JSONL file of prompts with patterns of correct answers. By default 30 simple
            questions.
        shadow: The number of users' prompts that every replica also answers in a round, for
            comparison with other replicas. At most as many as there are golden prompts to compare.
    """

    interval: _PositiveDuration | None = None
    prompts: _File | None = None
    shadow: Annotated[int, Field(ge=0, le=100)] = 0


class SamplingSettings(_Section):
    """Defaults of sampling.

    Attributes:
        max_tokens: The maximum number of tokens in an answer. None lets a chat fill the context.
    """

    max_tokens: Annotated[int, Field(gt=0)] | None = None


class ResponseStoreSettings(_Section):
    """Limits on responses that are kept for `previous_response_id` and GET.

    Responses are kept in the store if the settings name one, else in memory.

    Attributes:
        entries: The maximum number of responses of each owner in a store, or of all owners in
            memory; 0 stores none.
        bytes: The maximum size of these responses, in bytes.
        item_bytes: The maximum size of a response with its input, in bytes.
        age: The time for which a response is kept.
    """

    entries: Annotated[int, Field(ge=0)] = 2_000
    bytes: Annotated[int, Field(gt=0)] = 64_000_000
    item_bytes: Annotated[int, Field(gt=0)] = 1_000_000
    age: _PositiveDuration = Seconds(86_400)


class TenantConversations(_Section):
    """Overrides of the conversation settings for a tenant.

    Attributes:
        store: False if no data of the tenant's requests is stored.
        days: The tenant's value of `ConversationSettings.days`.
    """

    store: bool = True
    days: Annotated[int, Field(gt=0, le=36_500)] | None = None


class ConversationSettings(_Section):
    """Limits on stored conversations.

    Conversations are kept in the store, or in `store.db` of the cache folder without a store.

    Attributes:
        entries: The maximum number of conversations of each owner, 0 to store none.
        bytes: The maximum size of each owner's conversations, in characters. A message counts 256
            more than it has.
        conversation_bytes: The maximum size of a conversation with its system prompt and metadata,
            in characters.
        conversation_messages: The maximum number of messages in a conversation with all its
            branches.
        days: The number of days without a write after which a conversation is deleted, None for
            never.
        purge_days: The number of days after which a deleted conversation is purged.
        title_model: The model that writes titles after first answers, billed to the caller. None
            uses the first words of a conversation.
        archive: The folder that receives conversations as JSON lines before `days` deletes them.
            None archives nothing.
        tenants: Overrides by tenant.
    """

    entries: Annotated[int, Field(ge=0)] = 20_000
    bytes: Annotated[int, Field(gt=0)] = 512_000_000
    conversation_bytes: Annotated[int, Field(gt=0)] = 8_000_000
    conversation_messages: Annotated[int, Field(gt=0)] = 4096
    days: Annotated[int, Field(gt=0, le=36_500)] | None = None
    purge_days: Annotated[int, Field(ge=0, le=36_500)] = 30
    title_model: str | None = None
    archive: Path | None = None
    tenants: dict[str, TenantConversations] = Field(default_factory=dict)

    def stores(self, tenant: str) -> bool:
        """Return True if requests of this tenant may be stored."""
        return tenant not in self.tenants or self.tenants[tenant].store


class ResumeSettings(_Section):
    """Settings of streams that continue when their gateway is lost. They need `redis`.

    Attributes:
        lease: The time without a heartbeat of a gateway after which other gateways continue its
            answers, up to a quarter of that time later. At most 6 s, because clients may continue
            the messages of a lost gateway after 8 s, and its reserved money is free after 15 s.
    """

    lease: Annotated[_PositiveDuration, Field(ge=0.5, le=6)] = Seconds(5)


def _check_url(url: str) -> str:
    if http_url_problem(url):
        raise ValueError("this is not a URL; write one such as http://127.0.0.1:9090")
    return url


class WebSettings(_Section):
    """Settings of the chat page and the administration page.

    Attributes:
        hosts: Host names at which a gateway without API keys answers, in addition to IP addresses
            and names without a public domain, such as `localhost`, `gateway` and `box.local`. A
            page of another site could make any other name resolve to the gateway.
        prometheus: The URL of a Prometheus server, whose alerts the administration page shows.
    """

    hosts: list[str] = Field(default_factory=list)
    prometheus: Annotated[str, AfterValidator(_check_url)] | None = None


def _check_https(url: str) -> str:
    if not is_secure_url(url):
        raise ValueError("anyone on the network can read or change what is sent without https; name an https URL")
    return url


_Url = Annotated[str, AfterValidator(_check_url), AfterValidator(_check_https)]


class RulesFilterSettings(_Section):
    """A safety filter of regular expressions and whole words.

    The expressions have RE2's syntax and must have a bounded width.

    Attributes:
        kind: The kind of filter.
        category: The category of the filter's findings. None: the filter's name.
        patterns: The regular expressions.
        words: The words and phrases.
        words_file: A text file with a word or phrase per line.
        ignore_case: True if upper and lower case are equal.
    """

    kind: Literal["rules"]
    category: str | None = None
    patterns: list[str] = Field(default_factory=list)
    words: list[str] = Field(default_factory=list)
    words_file: _File | None = None
    ignore_case: bool = True


class LanguageFilterSettings(_Section):
    """A safety filter that finds letters of writing systems other than `scripts`.

    Attributes:
        kind: The kind of filter.
        category: The category of the filter's findings. None: the filter's name.
        scripts: The permitted writing systems, such as latin or thai.
    """

    kind: Literal["language"]
    category: str | None = None
    scripts: list[str]


class GuardSettings(_Section):
    """A guard model of this gateway, which writes whether a text is safe, such as Llama Guard.

    Attributes:
        model: The model's name.
        prompt: The message to the model, in which `{text}` stands for the text.
        safe: The first word of the model's answer for a safe text.
        unsafe: The first word of the model's answer for an unsafe text. The next word is the
            category.
        categories: Names of categories by the model's codes, such as S1.
        timeout: The time after which the filter counts as unavailable.
    """

    model: str
    prompt: str = "{text}"
    safe: str = "safe"
    unsafe: str = "unsafe"
    categories: dict[str, str] = Field(default_factory=dict)
    timeout: _PositiveDuration = Seconds(5)

    @field_validator("prompt")
    @classmethod
    def _has_a_place_for_the_text(cls, prompt: str) -> str:
        if "{text}" not in prompt:
            raise ValueError("the prompt of a guard does not contain the text; write {text} where it belongs")
        return prompt


class ModelFilterSettings(_Section):
    """A safety filter that asks a model of this gateway: an embedding model or a guard model.

    Attributes:
        kind: The kind of filter.
        category: The category of a guard's findings. None: the filter's name. Not used with `head`,
            whose classifier has its own categories.
        head: A classifier of an embedding model's vectors, written by `llmops safety train`.
        guard: A guard model, as an alternative to `head`.
    """

    kind: Literal["model"]
    category: str | None = None
    head: _File | None = None
    guard: GuardSettings | None = None

    @model_validator(mode="after")
    def _asks_one_model(self) -> ModelFilterSettings:
        if (self.head is None) == (self.guard is None):
            raise ValueError("a filter of kind model needs either `head` or `guard`; set exactly one of them")
        return self


class HttpFilterSettings(_Section):
    """A safety filter that sends texts to a server with OpenAI's `POST /v1/moderations`.

    Attributes:
        kind: The kind of filter.
        category: Not used, because the server's answer has the category.
        url: The complete URL of the endpoint.
        model: The model to request, None for the server's default.
        key_env: The environment variable with the server's API key. None sends no key.
        timeout: The time after which the filter counts as unavailable.
    """

    kind: Literal["http"]
    category: str | None = None
    url: _Url
    model: str | None = None
    key_env: _VariableName | None = None
    timeout: _PositiveDuration = Seconds(2)


FilterSettings = Annotated[
    RulesFilterSettings | LanguageFilterSettings | ModelFilterSettings | HttpFilterSettings, Field(discriminator="kind")
]


class SafetyPolicy(_Section):
    """The safety filters that apply to a tenant's requests.

    Attributes:
        prompt: The filters of prompts. The first finding rejects the request.
        answer: The filters of answers and their modes: `hold`, `cut` or `observe`.
        fail: The treatment of a text that a filter could not judge: `closed` rejects it, `open`
            lets it pass.
    """

    prompt: list[str] = Field(default_factory=list)
    answer: dict[str, Literal["hold", "cut", "observe"]] = Field(default_factory=dict)
    fail: Literal["open", "closed"] = "closed"


class SafetySettings(_Section):
    """Safety filters by name, and the policies that apply them.

    Attributes:
        filters: The filters, by name.
        policy: The policy of every tenant without a policy of its own.
        tenants: Policies by tenant.
        window: The number of characters of an answer that a filter with a model or service judges
            at a time.
    """

    filters: dict[str, FilterSettings] = Field(default_factory=dict)
    policy: SafetyPolicy = SafetyPolicy()
    tenants: dict[str, SafetyPolicy] = Field(default_factory=dict)
    window: Annotated[int, Field(ge=16, le=4096)] = 200

    @model_validator(mode="after")
    def _names_its_filters(self) -> SafetySettings:
        for policy in (self.policy, *self.tenants.values()):
            unknown = {*policy.prompt, *policy.answer} - set(self.filters)
            if unknown:
                wrong = sorted(unknown)[0]
                raise ValueError(f"a policy names the filter {wrong}, which is not in `filters`; describe it there")
        return self


#: Entry of `tenants` that allows a provider to all tenants, and to callers without a key.
EVERY_TENANT = "*"


class ProviderSettings(_Section):
    """Another OpenAI-compatible server, which receives the overflow of chats from an alias.

    Attributes:
        url: The base URL, which ends before `/chat/completions`.
        key_env: The environment variable with the provider's API key.
        key_file: The file with the provider's API key, as an alternative to `key_env`.
        tenants: The tenants whose chats may be sent to the provider. `*` allows all tenants, and
            callers without a key.
        context: The context length of the provider's models, in tokens.
        concurrent: The maximum number of requests to the provider at a time.
        timeout: The time without data from the provider after which the connection counts as lost.
    """

    url: _Url
    key_env: _VariableName | None = None
    key_file: _File | None = None
    tenants: list[str] = Field(default_factory=list)
    context: Annotated[int, Field(gt=1)] = 128_000
    concurrent: Annotated[int, Field(gt=0)] = 64
    timeout: _PositiveDuration = Seconds(60)

    @field_validator("url")
    @classmethod
    def _has_no_secret(cls, url: str) -> str:
        if "@" in url or urlsplit(url).query:
            raise ValueError(
                "a key in a URL appears in logs; provide the key with key_env or key_file, and write an @ of the path "
                "as %40"
            )
        return url

    @model_validator(mode="after")
    def _has_one_key(self) -> ProviderSettings:
        if self.key_env and self.key_file:
            raise ValueError("set exactly one of key_env and key_file")
        return self


class KeyCacheSettings(_Section):
    """The cache of looked-up API keys.

    Attributes:
        fresh: The time after which a key is looked up again.
        stale: The time for which a cached key stays valid while the store is unavailable.
    """

    fresh: _PositiveDuration = Seconds(30)
    stale: Seconds = Seconds(3600)


class UsageSettings(_Section):
    """The outbox of usage events.

    Attributes:
        outbox: The folder of events that are not in the ledger yet. None: `usage` in the cache
            folder.
        bytes: The maximum size of the folder per gateway, in bytes.
        when_full: The behaviour when the folder is full: `refuse` rejects requests, `serve`
            continues without recording usage.
        engines: URLs of metrics pages of Triton servers, whose token counts `llmops control`
            compares with the bill.
    """

    outbox: Path | None = None
    bytes: Annotated[int, Field(ge=2**20)] = 2**30
    when_full: Literal["refuse", "serve"] = "refuse"
    engines: list[str] = Field(default_factory=list)


class AuditSettings(_Section):
    """Settings of the audit log.

    Attributes:
        days: The age in days at which `llmops control` deletes entries and dead letters. None keeps
            all.
    """

    days: Annotated[int, Field(gt=0, le=36_500)] | None = 400


class ClaimSettings(_Section):
    """The names of the claims with a token's tenant, user and scopes.

    `a.b` is the claim `b` within the claim `a`.

    Attributes:
        tenant: The claim with the tenant's name.
        user: The claim with the user's name.
        scopes: The claim with the scopes.
    """

    tenant: str = "tenant"
    user: str = "email"
    scopes: str = "scope"


_Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class OidcSettings(_Section):
    """An OpenID Connect provider, whose tokens are accepted in addition to API keys.

    Attributes:
        issuer: The provider's URL.
        audience: The audience that a token must have.
        jwks: The URL of the provider's signing keys, needed if it has no discovery document.
        algorithms: The accepted signature algorithms.
        tenant: The tenant of users whose token has no tenant claim.
        claims: The names of the claims.
        scope_prefix: The prefix of the scopes that apply to the gateway.
        scopes: The scopes of a token that has no scope with the prefix.
        leeway: The tolerated difference between clocks.
        refresh: The time after which the provider's signing keys are read again. At least the
            minute over which providers count readings, so that strangers who invent key ids cannot
            use up what the schedule needs.
    """

    issuer: _Url
    audience: Annotated[str, Field(min_length=1)]
    jwks: _Url | None = None
    algorithms: Annotated[list[_Algorithm], Field(min_length=1)] = ["RS256", "PS256", "ES256", "EdDSA"]
    tenant: str | None = None
    claims: ClaimSettings = ClaimSettings()
    scope_prefix: str = "llmops:"
    scopes: list[str] = ["inference"]
    leeway: Annotated[Seconds, Field(le=300)] = Seconds(30)
    refresh: Annotated[_PositiveDuration, Field(ge=60)] = Seconds(300)


# gRPC defines these schemes of server names: https://github.com/grpc/grpc/blob/master/doc/naming.md
_GRPC_SCHEMES = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:")


def _check_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    known = address.startswith(_GRPC_SCHEMES)
    if not known and (not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536):
        # A password may precede an @ by mistake, and must not be shown.
        shown = address.rpartition("@")[2]
        raise ValueError(f"{shown!r} is not HOST:PORT; write an address such as 127.0.0.1:8001")
    return address


def _check_servers(servers: str) -> str:
    if "@" in servers:
        # The message shows no part of it, because a password may have a comma.
        raise ValueError(
            "a broker's address has no user and no password; write HOST:PORT, and set `user` and `password`"
        )
    return ",".join(map(_check_address, servers.split(",")))


class KafkaSettings(_Section):
    """A Kafka topic that transports usage events to `llmops control`.

    Attributes:
        servers: HOST:PORT of the brokers, separated by commas.
        topic: The name of the topic.
        tls: True if connections to the brokers are encrypted.
        user: The user for SASL, None for no authentication.
        password: The password for SASL.
        mechanism: The mechanism of SASL.
        signing_keys: A key, or two keys separated by a comma during a rotation. The first key signs
            events, and both keys verify them.
        signing_keys_file: A file with a key per line, as an alternative to `signing_keys`.
    """

    servers: Annotated[str, AfterValidator(_check_servers)]
    topic: str = "llmops.usage"
    tls: bool = False
    user: str | None = None
    password: Annotated[str | None, Field(repr=False)] = None
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    signing_keys: Annotated[str | None, Field(repr=False)] = None
    signing_keys_file: _File | None = None


def _add_path(url: str) -> str:
    parts = urlsplit(url)
    return url if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


class TraceSettings(_Section):
    """Settings for the export of traces.

    Attributes:
        endpoint: The URL of an OTLP receiver over HTTP. A URL without a path gets the path
            /v1/traces.
        ratio: The fraction of the requests without a `traceparent` that are traced.
        per_second: The maximum number of traces per second of sampled requests, and of requests
            that failed, were slow or failed over.
        queue: The maximum number of traces that wait to be sent.
    """

    endpoint: Annotated[str, AfterValidator(_check_url), AfterValidator(_add_path)]
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    per_second: Annotated[int, Field(gt=0)] = 50
    queue: Annotated[int, Field(gt=0)] = 2048


def _split(value: Any) -> Any:
    """Split a text at its commas, because flags and environment variables cannot be lists."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _check_replica(text: str) -> str:
    parse_replica(text)
    return text


def _check_redis_url(url: str | None) -> str | None:
    try:
        parts = urlsplit(url or "redis:")
        # After a / ? or # in a password, the rest of the password would be a part that messages
        # show.
        shown = f"{parts.hostname}{parts.path}{parts.query}#{parts.fragment}"
        valid = parts.scheme in ("redis", "rediss", "unix") and parts.port != 0 and "@" not in shown
    except ValueError:
        valid = False
    if not valid:
        # The message does not show the URL, because it may contain a password.
        raise ValueError(
            "this is not the URL of a Redis or Valkey server; write one such as redis://127.0.0.1:6379/0, with @ / ? # "
            "and % in a password as %40 %2F %3F %23 %25"
        )
    return url


def _alias_kind(alias: Any) -> str:
    return _ROUTED if isinstance(alias, (Mapping, RoutedAlias)) else _LISTED


# Errors name only the kind that was meant, and `error_path` leaves these names out.
_LISTED, _ROUTED = "list[str]", "dict[str]"
_Alias = Annotated[
    Annotated[list[str], Field(min_length=1), Tag(_LISTED)] | Annotated[RoutedAlias, Tag(_ROUTED)],
    Discriminator(_alias_kind),
]


class GatewaySettings(_Section):
    """All settings of a gateway.

    Attributes:
        triton: HOST:PORT of Triton's gRPC endpoint.
        replicas: Several servers, which override `triton`: HOST:PORT, dns:NAME:PORT for all
            addresses of a DNS name, or [NAME=]HOST:PORT/ENGINE_MODEL for a single model of a
            server.
        cache_scope: The callers that share cached prefixes: those of a `tenant` or all (`shared`).
            By default `tenant` if there is a store.
        metrics_port: The port of Triton's metrics, for engines that do not report their state.
        host: The address to listen on.
        port: The port to listen on, 0 for any free port.
        models: Overrides by model.
        aliases: Names that stand for models, by name. The first model that is served and has
            capacity answers, or the model that suits the request. PROVIDER/MODEL at the end is a
            model of a provider.
        providers: Other servers, by name, which answer chats when an alias has no capacity left.
        slo: The objectives of models without their own objectives.
        tiers: The tiers of keys, the highest first.
        waiting: Limits on waiting requests.
        degraded: Settings of degraded mode, None to turn it off.
        limits: Limits on requests and on concurrent work.
        quotas: Default quotas of callers.
        redis: The URL of a Redis or Valkey server through which gateways share limits and running
            answers.
        timeouts: Time-outs of engines and clients.
        quality: Golden prompts.
        sampling: Defaults of sampling.
        responses: Limits on stored responses.
        conversations: Limits on stored conversations.
        resume: Settings of streams that continue at another gateway.
        web: Settings of the pages.
        safety: Safety filters.
        store: The URL of a database for keys, usage and conversations. API keys are required once
            the store contains any.
        open: True to require no API keys.
        lookups: The cache of looked-up API keys.
        usage: The outbox of usage events.
        audit: Settings of the audit log.
        oidc: An OpenID Connect provider.
        kafka: A Kafka topic for usage events.
        traces: Settings for the export of traces, None to export none.
        access_log: A file that receives a line of JSON per request, or `-` for standard output.
        strict_fields: True to reject unknown fields. By default they cause a warning in
            `x-llmops-warnings`.
        drop_session_blocks: True to remove system blocks that differ in each session of an agent,
            so that sessions share cached prefixes.
        request_checks: `module:name` of functions that take these settings and return a Check
            (gateway/http/middleware.py).
        refresh: The time between two searches for models.
        text_threads: The number of threads that render and tokenize.
        workers: The number of gateway processes that share the port.
        log_level: The minimum level of logged messages.
    """

    triton: Annotated[str, AfterValidator(_check_address)] = "127.0.0.1:8001"
    replicas: Annotated[
        list[Annotated[str, AfterValidator(_check_replica)]],
        BeforeValidator(_split, json_schema_input_type=list[str] | str),
        NoDecode,
    ] = Field(default_factory=list)
    cache_scope: Literal["tenant", "shared"] | None = None
    metrics_port: Annotated[int, Field(gt=0, le=65535)] = 8002
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 9000
    models: dict[str, ModelOverrides] = Field(default_factory=dict)
    aliases: dict[str, _Alias] = Field(default_factory=dict)
    providers: dict[str, ProviderSettings] = Field(default_factory=dict)
    slo: SloSettings = SloSettings()
    tiers: dict[str, TierSettings] = Field(default_factory=dict, validate_default=True)
    waiting: QueueSettings = QueueSettings()
    degraded: DegradedSettings | None = None
    limits: RequestLimits = RequestLimits()
    quotas: Quotas = Quotas()
    redis: Annotated[str | None, AfterValidator(_check_redis_url), Field(repr=False)] = None
    timeouts: Timeouts = Timeouts()
    quality: QualitySettings = QualitySettings()
    sampling: SamplingSettings = SamplingSettings()
    responses: ResponseStoreSettings = ResponseStoreSettings()
    conversations: ConversationSettings = ConversationSettings()
    resume: ResumeSettings = ResumeSettings()
    web: WebSettings = WebSettings()
    safety: SafetySettings = SafetySettings()
    # The URL may contain a password.
    store: str | None = Field(default=None, repr=False)
    open: bool = False
    lookups: KeyCacheSettings = KeyCacheSettings()
    usage: UsageSettings = UsageSettings()
    audit: AuditSettings = AuditSettings()
    oidc: OidcSettings | None = None
    kafka: KafkaSettings | None = None
    traces: TraceSettings | None = None
    access_log: Annotated[str, Field(min_length=1)] | None = None
    strict_fields: bool = False
    drop_session_blocks: bool = True
    request_checks: list[ImportString[Callable[..., Any]]] = Field(default_factory=list)
    refresh: _PositiveDuration = Seconds(2)
    text_threads: Annotated[int, Field(ge=1)] = 2
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    log_level: str = "info"

    @field_validator("aliases")
    @classmethod
    def _aliases_name_models(cls, aliases: dict[str, list[str] | RoutedAlias]) -> dict[str, list[str] | RoutedAlias]:
        for alias, target in aliases.items():
            models = target.models if isinstance(target, RoutedAlias) else target
            if alias in models:
                raise ValueError(f"the alias {alias} has the name of its own model; choose another name for it")
            if nested := next((one for one in models if one in aliases), None):
                raise ValueError(f"the alias {alias} names the alias {nested}; name models instead")
        return aliases

    @field_validator("tiers")
    @classmethod
    def _has_tiers_of_slo(cls, tiers: dict[str, TierSettings], info: ValidationInfo) -> dict[str, TierSettings]:
        models = info.data.get("models", {}).values()
        for slo in (info.data.get("slo"), *(model.slo for model in models)):
            if unknown := sorted(set(slo.tiers if slo is not None else ()) - set(tiers)):
                raise ValueError(f"`slo.tiers` names {unknown[0]}, which is not a tier; describe it in `tiers` too")
        return tiers

    @field_validator("degraded")
    @classmethod
    def _has_a_queue(cls, degraded: DegradedSettings | None, info: ValidationInfo) -> DegradedSettings | None:
        parts = {name: info.data[name] for name in ("models", "slo", "tiers") if name in info.data}
        if degraded is not None and not cls.model_construct(**parts).queues_requests:
            raise ValueError(
                "it depends on the gateway's queue, which this gateway does not use; set `slo.ttft_p95` or `tiers` too"
            )
        return degraded

    @model_validator(mode="after")
    def _overflow_ends(self) -> GatewaySettings:
        for name in self.providers:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
                raise ValueError(
                    f"{name!r} cannot be a provider's name; use letters, digits, dots, hyphens and underscores"
                )
        for alias, models in self._alias_models.items():
            overflows = [bool(self.provider_of(one)) for one in models]
            if isinstance(self.aliases[alias], RoutedAlias) and overflows[2:].count(False):
                raise ValueError(
                    f"the `overflow` of the alias {alias} must name models of providers only; write PROVIDER/MODEL"
                )
            if all(overflows) or overflows != sorted(overflows):
                raise ValueError(f"the alias {alias} must name models of this gateway first, and of providers last")
        return self

    def provider_of(self, model: str) -> str:
        """Return the provider in PROVIDER/MODEL, or an empty string for a model of this gateway."""
        name, slash, _ = model.partition("/")
        return name if slash and name in self.providers else ""

    @property
    def local_aliases(self) -> dict[str, list[str]]:
        """Return this gateway's models of each alias, without models of providers."""
        return {
            alias: [one for one in models if not self.provider_of(one)] for alias, models in self._alias_models.items()
        }

    @property
    def provider_aliases(self) -> dict[str, list[str]]:
        """Return the models of providers at the end of each alias, as PROVIDER/MODEL."""
        return {alias: [one for one in models if self.provider_of(one)] for alias, models in self._alias_models.items()}

    @property
    def _alias_models(self) -> dict[str, list[str]]:
        return {
            alias: target.models if isinstance(target, RoutedAlias) else target
            for alias, target in self.aliases.items()
        }

    @property
    def tenants_apart(self) -> bool:
        """Return True if tenants do not share cached prefixes."""
        return (self.cache_scope or ("tenant" if self.store or self.oidc else "")) == "tenant"

    @property
    def queues_requests(self) -> bool:
        """Return True if requests wait in the gateway's queue for a replica.

        Otherwise, requests are sent to a replica immediately.
        """
        return any(self.queues_requests_of(name) for name in ("", *self.models))

    def queues_requests_of(self, model: str) -> bool:
        """Return True if requests of a model wait in the gateway's queue.

        Requests wait if there are tiers, or if the model has an objective for TTFT.
        """
        slo = self.slo_of(model)
        return bool(self.tiers) or any(one.limits("ttft") for one in (slo, *slo.tiers.values()))

    def slo_of(self, model: str) -> SloSettings:
        """Return the objectives of a model."""
        overrides = self.models.get(model)
        return overrides.slo if overrides is not None and overrides.slo is not None else self.slo

    def objectives_of(self, model: str, tier: str) -> list[Objective]:
        """Return the objectives that apply to a model's requests of a tier."""
        slo = self.slo_of(model)
        own = slo.tiers.get(tier)
        return slo.listed() if own is None else slo.model_copy(update=own.model_dump(exclude_none=True)).listed()


class _EnvironmentSettings(GatewaySettings, BaseSettings):
    """The settings that pydantic-settings reads from environment variables."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid")


@dataclass(frozen=True)
class SettingsLayers:
    """Settings from other sources than a file.

    Attributes:
        place: A description of the sources, for messages.
        mappings: The layers of settings. Each layer overrides the layers after it.
        alone: True to ignore environment variables, for the settings of a gateway on another
            machine.
    """

    place: str
    mappings: tuple[Mapping[str, Any], ...]
    alone: bool = False


def load_settings(config: Path | SettingsLayers | None = None, **flags: Any) -> GatewaySettings:
    """Return the settings of `flags`, environment variables and `config`.

    Args:
        config: The YAML file, or other layers of settings; None for neither.
        flags: Settings from command-line flags. A value of None is not set.

    Raises:
        InputError: A setting is unknown or invalid, or the file cannot be read. The message names
            the setting.
    """
    _reject_misspelt_environment()
    layers = config if isinstance(config, SettingsLayers) else SettingsLayers(str(config or ""), (_read_file(config),))
    set_flags = {name: value for name, value in flags.items() if value is not None}
    values: dict[str, Any] = {}
    for layer in (*reversed(layers.mappings), {} if layers.alone else _environment(), set_flags):
        values = _merge(values, layer)
    try:
        return GatewaySettings.model_validate(values)
    except ValidationError as error:
        where = f"flags, environment or {layers.place}" if layers.place else "flags or environment"
        raise InputError(explain_settings_error(error, GatewaySettings, where, "docs/gateway.md")) from error


def _read_file(path: Path | None) -> dict[str, Any]:
    content: Any = read_yaml(path) or {} if path is not None else {}
    if not isinstance(content, dict):
        raise InputError(f"The configuration {path} must be a mapping of settings, such as `triton: 127.0.0.1:8001`.")
    return {str(key): value for key, value in content.items()}


def _environment() -> dict[str, Any]:
    try:
        return EnvSettingsSource(_EnvironmentSettings)()
    except SettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        name = PREFIX + field[1].upper() if field else "An environment variable of the gateway"
        raise InputError(
            f"The environment variable {name} is not JSON, which this setting needs in the environment; correct it."
        ) from error


def _merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with the values of both mappings.

    Sections are merged. Other values of `upper` override values of `lower`.
    """
    merged = dict(lower)
    for name, value in upper.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _reject_misspelt_environment() -> None:
    """Reject environment variables whose names resemble the name of a setting.

    Other unknown variables are ignored, because other commands have LLMOPS_ variables too.

    Raises:
        InputError: A variable's name is probably misspelt.
    """
    known = [PREFIX + name.upper() for name in GatewaySettings.model_fields]
    for name in os.environ:
        stem = name.split("__")[0]
        if not name.startswith(PREFIX) or stem in known:
            continue
        nearest = difflib.get_close_matches(stem, known, n=1, cutoff=0.85)
        if nearest:
            raise InputError(f"The environment variable {name} is an unknown setting; did you mean {nearest[0]}?")


def explain_settings_error(error: ValidationError, kind: type[BaseModel], where: str, docs: str) -> str:
    """Return a message about the first invalid setting.

    For an unknown setting, the message suggests the setting with the most similar name.

    Args:
        error: The validation error.
        kind: The model of the settings.
        where: A description of where the settings come from, empty to leave it out.
        docs: The page that lists the settings.
    """
    errors = error.errors()
    # Report a misspelt name first, because it may be the reason why a setting is missing.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    where = f" ({where})" if where else ""
    if first["type"] != "extra_forbidden":
        key, clause = explain_first_error(errors)
        return f"The setting `{key}`{where} is not usable: {clause}."
    *section, name = first["loc"]
    nearest = difflib.get_close_matches(str(name), _names_in(kind, section), n=1)
    suggestion = f"did you mean `{nearest[0]}`? " if nearest else ""
    key = error_path(first)
    return f"Unknown setting `{key}`{where}; {suggestion}{docs} lists all settings."


def _names_in(kind: Any, section: Sequence[str | int]) -> list[str]:
    """Return the names of the settings in a section.

    The result is empty for a dict of sections, which can have any names.
    """
    for part in section:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
            # Of a union of sections with a `kind`, pydantic adds the kind to the path.
            kinds = [one for one in get_args(kind) if "kind" in getattr(one, "model_fields", ())]
            if kinds:
                kind = next(one for one in kinds if part in get_args(one.model_fields["kind"].annotation))
                continue
        if not hasattr(kind, "model_fields") and not get_args(kind):
            return []
        kind = kind.model_fields[part].annotation if hasattr(kind, "model_fields") else get_args(kind)[-1]
        if get_origin(kind) in (Union, UnionType):  # The annotation is `Section | None`.
            kind = next((one for one in get_args(kind) if hasattr(one, "model_fields")), kind)
    return list(kind.model_fields) if hasattr(kind, "model_fields") else []
