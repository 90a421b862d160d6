"""The gateway's settings. Flags win over LLMOPS_… environment variables, those over the YAML file."""

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
    Field,
    ImportString,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from llmops.durations import Seconds
from llmops.errors import InputError
from llmops.gateway.replica_address import parse_replica
from llmops.hosts import is_secure_url
from llmops.validation_errors import explain_first_error
from llmops.yaml_files import read_yaml

PREFIX = "LLMOPS_"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _above_zero(found: Seconds) -> Seconds:
    if not found:
        raise ValueError("it must be above zero, such as 500ms or 0.5s")
    return found


_PositiveDuration = Annotated[Seconds, AfterValidator(_above_zero)]


class SloSettings(_Section):
    """What 95 of 100 answers are to keep, each measured by it: `500ms`, `0.5s`; None is no objective.

    `ttft_p95`: from the request's arrival to the first token; `tpot_p95`: per token after it.
    """

    ttft_p95: _PositiveDuration | None = None
    tpot_p95: _PositiveDuration | None = None


class TierSettings(_Section):
    """What requests of one tier get when there are more than the replicas can take; the tiers before it come first.

    `share`: of all tokens the least it gets while it waits; `max_wait`: who would wait longer for the first token is
    refused at once (None: 0.6 of the objective for the first token in the first tier, 60 s in others); `weight`: what
    each of its tenants that wait counts for when several gateways share a replica.
    """

    weight: Annotated[float, Field(gt=0)] = 1.0
    share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    max_wait: _PositiveDuration | None = None


class QueueSettings(_Section):
    """How many requests of a model may wait in this worker, and what they may hold."""

    entries: Annotated[int, Field(gt=0)] = 4096
    bytes: Annotated[int, Field(gt=0)] = 256 * 2**20


class ModelOverrides(_Section):
    """What this gateway knows better than the model's own card, e.g. where its copy of the tokenizer is.

    Unset fields are the card's. A model without a card (not made by `llmops repo`) needs tokenizer_dir, max_seq_len,
    vocab_size and end_ids, and `engine_model` where the Triton model is not called NAME-tensorrt_llm.
    `control_tokens_in_messages`: text such as `<|im_end|>` in a message becomes the token, as the template's own does.
    `slo`: in place of the gateway's.
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
        """The overrides in the card's own terms."""
        fields = self.model_dump(exclude_none=True, exclude={"engine_model", "control_tokens_in_messages", "slo"})
        return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}


class RequestLimits(_Section):
    """What is checked before any work starts, and how much of it one worker does at once.

    `json_values`: of a body, a key or a container counting for eight; `held_bytes`: of all bodies whose requests are
    not over; `connections_per_client`: of one address (IPv6: one /64), None for half of `connections`, 0 for any
    number; `prompt_bytes`: UTF-8 of all texts of one request that are tokenised; `queued`: sequences per engine
    beyond those of its batch; `queued_inputs`: texts that wait for one encoder; `preparing`: requests that wait for a
    thread that renders and tokenises; `reads_per_second`: requests of one caller that are no POST, 0 for any number;
    `inputs`: of one embeddings request, or documents of one rerank request;
    `choices`: of a guided choice.
    """

    body_bytes: Annotated[int, Field(gt=0)] = 16 * 2**20
    json_values: Annotated[int, Field(gt=0)] = 200_000
    held_bytes: Annotated[int, Field(gt=0)] = 256 * 2**20
    prompt_bytes: Annotated[int, Field(gt=0)] = 4 * 2**20
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
    """Requests and tokens (prompt and answer) per minute, and requests at once; None: no limit."""

    rpm: _QuotaLimit = None
    tpm: _QuotaLimit = None
    concurrent: _QuotaLimit = None


class Quotas(_Section):
    """What callers may use. `each`: of those without quotas of their own, by key or by address; `models`: what each of
    them may use of one model; `all`: everybody together.
    """

    each: QuotaSettings = QuotaSettings()
    all: QuotaSettings = QuotaSettings()
    models: dict[str, QuotaSettings] = Field(default_factory=dict)


class Timeouts(_Section):
    """`first_token` includes waiting in the engine's queue; `idle` is between two chunks of the engine;
    `client` is how long a client may leave its answer unread; `header` and `body` are what it has to send those;
    `connection` how long one without a request stays open; `keepalive` after how long a silent stream says that it
    lives (0: never).
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


class SamplingSettings(_Section):
    """What requests get that do not say. `max_tokens`: None lets a chat fill the context."""

    max_tokens: Annotated[int, Field(gt=0)] | None = None


class ResponseStoreSettings(_Section):
    """Responses that are kept for `previous_response_id` and GET: in the store if there is one, else in memory.

    `entries` (0 stores none) and `bytes` bound the responses of each owner in a store, and of all owners in memory;
    `item_bytes` bounds a single response with its input, `age` how long it is kept.
    """

    entries: Annotated[int, Field(ge=0)] = 2_000
    bytes: Annotated[int, Field(gt=0)] = 64_000_000
    item_bytes: Annotated[int, Field(gt=0)] = 1_000_000
    age: _PositiveDuration = Seconds(86_400)


class TenantConversations(_Section):
    """What is different for a tenant. `store` false: nothing of its requests is stored; `days`: as of all tenants."""

    store: bool = True
    days: Annotated[int, Field(gt=0)] | None = None


class ConversationSettings(_Section):
    """Conversations in the store, or in `store.db` of the cache folder where no store is named.

    `entries` (0 stores none) and `bytes` bound the conversations of each owner, `conversation_bytes` bounds a single
    one. A conversation that nobody writes to for `days` is deleted (None: never), and a deleted one is purged after
    `purge_days`. `tenants` have what is different for a tenant.
    """

    entries: Annotated[int, Field(ge=0)] = 20_000
    bytes: Annotated[int, Field(gt=0)] = 512_000_000
    conversation_bytes: Annotated[int, Field(gt=0)] = 8_000_000
    days: Annotated[int, Field(gt=0)] | None = None
    purge_days: Annotated[int, Field(ge=0)] = 30
    tenants: dict[str, TenantConversations] = Field(default_factory=dict)

    def stores(self, tenant: str) -> bool:
        """Return True if requests of this tenant may be stored."""
        return tenant not in self.tenants or self.tenants[tenant].store


class WebSettings(_Section):
    """The chat page. `hosts`: names by which browsers may reach a gateway that asks for no key, besides `localhost` and
    IP addresses; a page of another site could make any other name point here.
    """

    hosts: list[str] = Field(default_factory=list)


def _https(url: str | None) -> str | None:
    if url is None:
        return None
    parts = urlsplit(url)
    if not parts.hostname or parts.scheme not in ("http", "https"):
        raise ValueError("this is not a URL, such as https://login.example/realms/acme")
    if not is_secure_url(url):
        raise ValueError("keys that are read without https may be anybody's; name an https URL")
    return url


_Url = Annotated[str, AfterValidator(_https)]


class RulesFilterSettings(_Section):
    """A safety filter of regular expressions in RE2's syntax, with a bounded width, and of whole words.

    Attributes:
        words_file: A text file with one word or phrase a line.
    """

    kind: Literal["rules"]
    category: str | None = None
    patterns: list[str] = Field(default_factory=list)
    words: list[str] = Field(default_factory=list)
    words_file: Path | None = None
    ignore_case: bool = True


class LanguageFilterSettings(_Section):
    """A safety filter that finds letters of other writing systems than `scripts`, such as latin or thai."""

    kind: Literal["language"]
    category: str | None = None
    scripts: list[str]


class ModelFilterSettings(_Section):
    """A safety filter that judges the vector of an embedding model with a `head` of `llmops safety train`."""

    kind: Literal["model"]
    category: str | None = None
    head: Path


class HttpFilterSettings(_Section):
    """A safety filter that asks any server for OpenAI's `POST /v1/moderations`.

    Attributes:
        url: The whole URL.
        key_env: The environment variable that has the server's key; no key where it is None.
    """

    kind: Literal["http"]
    category: str | None = None
    url: _Url
    model: str | None = None
    key_env: str | None = None
    timeout: _PositiveDuration = Seconds(2)


FilterSettings = Annotated[
    RulesFilterSettings | LanguageFilterSettings | ModelFilterSettings | HttpFilterSettings, Field(discriminator="kind")
]


class SafetyPolicy(_Section):
    """The safety filters that the requests of a tenant meet.

    Attributes:
        prompt: Filters of prompts; the first that finds something refuses the request.
        answer: Filters of answers and their modes: `hold`, `cut` or `observe`.
        fail: `closed` lets nothing pass that a filter could not judge, `open` lets everything pass.
    """

    prompt: list[str] = Field(default_factory=list)
    answer: dict[str, Literal["hold", "cut", "observe"]] = Field(default_factory=dict)
    fail: Literal["open", "closed"] = "closed"


class SafetySettings(_Section):
    """Safety filters by name, and who meets them.

    Attributes:
        policy: The policy of every tenant without one of its own.
        tenants: Policies by tenant.
        window: Characters of an answer that a filter with a model or service judges at once.
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
                raise ValueError(f"a policy names the filter {sorted(unknown)[0]}, which `filters` does not describe")
        return self


class KeyCacheSettings(_Section):
    """The time for which a key that was looked up counts as it was: `fresh`, and `stale` while its store is away."""

    fresh: _PositiveDuration = Seconds(30)
    stale: Seconds = Seconds(3600)


class UsageSettings(_Section):
    """`journal`: the folder of what the ledger does not have yet, None for `usage` in the cache folder; `bytes`: what
    it may have, per worker; `when_full`: `serve` goes on without writing usage down where there is no room for it.
    `engines`: the metrics pages of Triton servers, whose tokens `llmops control` compares with the bill.
    """

    journal: Path | None = None
    bytes: Annotated[int, Field(ge=2**20)] = 2**30
    when_full: Literal["refuse", "serve"] = "refuse"
    engines: list[str] = Field(default_factory=list)


class AuditSettings(_Section):
    """`days`: entries of the audit log and parked events that are older are deleted by `llmops control`; None keeps
    all of them.
    """

    days: Annotated[int, Field(gt=0)] | None = 400


class ClaimSettings(_Section):
    """The claims (`a.b` for one within another) that say whose a token is, and what it may ask for."""

    tenant: str = "tenant"
    user: str = "email"
    scopes: str = "scope"


_Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class OidcSettings(_Section):
    """An OpenID Connect provider, whose tokens are taken beside keys.

    `jwks`: where its keys are, if it has no discovery document; `tenant`: of all its users, where no claim says it;
    `scopes`: of tokens that have none with `scope_prefix`; `leeway`: how far clocks may differ; `refresh`: after
    how long its keys are read again.
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
    refresh: Annotated[_PositiveDuration, Field(ge=10)] = Seconds(300)


def _brokers(servers: str) -> str:
    for one in servers.split(","):
        host, _, port = one.strip().rpartition(":")
        if not host or "/" in host or not port.isdecimal():
            raise ValueError(f"{one!r} is not HOST:PORT of a Kafka broker, such as 127.0.0.1:9092")
    return servers


class KafkaSettings(_Section):
    """Events of usage go through `topic` of the brokers at `servers` (HOST:PORT, with commas between them) and are read
    by `llmops control`. `user` and `password` are for SASL with `mechanism`, `tls` for brokers that encrypt.
    `signing_keys`: one key, or two with a comma between them during a rotation; the first signs events, both verify
    them. `signing_keys_file`: a file with a key in each line, instead.
    """

    servers: Annotated[str, AfterValidator(_brokers)]
    topic: str = "llmops.usage"
    tls: bool = False
    user: str | None = None
    password: Annotated[str | None, Field(repr=False)] = None
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    signing_keys: Annotated[str | None, Field(repr=False)] = None
    signing_keys_file: Path | None = None


def _receiver(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("this is not the URL of an OTLP receiver, such as http://127.0.0.1:4318")
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/traces"


class TraceSettings(_Section):
    """Traces go to `endpoint`, an OTLP receiver over HTTP; a URL without a path means /v1/traces.

    `ratio` of the requests without a `traceparent` that says it; `per_second`: of those so many, and as many again of
    those that failed, were slow or went on elsewhere; `queue`: how many may wait to be sent.
    """

    endpoint: Annotated[str, AfterValidator(_receiver)]
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    per_second: Annotated[int, Field(gt=0)] = 50
    queue: Annotated[int, Field(gt=0)] = 2048


# gRPC's own names of servers, https://github.com/grpc/grpc/blob/master/doc/naming.md
_GRPC_SCHEMES = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:")


def _replicas(given: Any) -> Any:
    """One text, or several with commas between, as flags and environment have them."""
    return [one.strip() for one in given.split(",") if one.strip()] if isinstance(given, str) else given


def _replica(text: str) -> str:
    parse_replica(text)
    return text


def _redis_url(url: str | None) -> str | None:
    if url is not None and not url.startswith(("redis://", "rediss://", "unix://")):
        # not shown: it may have a password
        raise ValueError("this is not the URL of a Redis or Valkey, such as redis://127.0.0.1:6379/0")
    return url


def _grpc_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    known = address.startswith(_GRPC_SCHEMES)
    if not known and (not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536):
        raise ValueError(f"{address!r} is not HOST:PORT of Triton's gRPC endpoint, such as 127.0.0.1:8001")
    return address


class GatewaySettings(BaseSettings):
    """Everything `llmops gateway` can be told.

    `request_checks`: `module:name` of what makes a Check (gateway/http/middleware.py) when it is called with these settings.
    `slo`: of all models without one of their own. `tiers`, the highest first, by the tiers of keys:
    who is served first.
    `replicas`: several servers as one, in place of `triton`: HOST:PORT each, dns:NAME:PORT for all that a name stands
    for, or [NAME=]HOST:PORT/ENGINE_MODEL. `cache_scope`: who shares cached prefixes; by default each tenant has its own
    where keys are asked for. `metrics_port`: of the servers, for engines that do not say their state in step streams.
    `store`: the URL of a store, whose keys are asked for as soon as there are any; with `open` nobody is asked.
    What is used is written there, with `kafka` by way of it. `strict_fields` refuses a request with an unknown field,
    which is otherwise answered with a warning in the header `x-llmops-warnings`. `access_log`: a file for a line of
    JSON per request, `-` for the standard output.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid")

    triton: Annotated[str, AfterValidator(_grpc_address)] = "127.0.0.1:8001"
    replicas: Annotated[
        list[Annotated[str, AfterValidator(_replica)]],
        BeforeValidator(_replicas, json_schema_input_type=list[str] | str),
        NoDecode,
    ] = Field(default_factory=list)
    cache_scope: Literal["tenant", "shared"] | None = None
    metrics_port: Annotated[int, Field(gt=0, le=65535)] = 8002
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 9000
    models: dict[str, ModelOverrides] = Field(default_factory=dict)
    slo: SloSettings = SloSettings()
    tiers: dict[str, TierSettings] = Field(default_factory=dict)
    waiting: QueueSettings = QueueSettings()
    limits: RequestLimits = RequestLimits()
    quotas: Quotas = Quotas()
    redis: Annotated[str | None, AfterValidator(_redis_url), Field(repr=False)] = None
    timeouts: Timeouts = Timeouts()
    sampling: SamplingSettings = SamplingSettings()
    responses: ResponseStoreSettings = ResponseStoreSettings()
    conversations: ConversationSettings = ConversationSettings()
    web: WebSettings = WebSettings()
    safety: SafetySettings = SafetySettings()
    # it can hold a password
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

    @property
    def queues_requests(self) -> bool:
        """Whether requests wait in the gateway for room on a replica, instead of going there at once."""
        every = [self.slo, *(one.slo for one in self.models.values() if one.slo is not None)]
        return bool(self.tiers) or any(slo.ttft_p95 is not None for slo in every)

    def slo_of(self, model: str) -> SloSettings:
        own = self.models.get(model)
        return own.slo if own is not None and own.slo is not None else self.slo

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _YamlFileSource(settings_cls)


class _YamlFileSource(YamlConfigSettingsSource):
    """The file of `load_settings`. Raises InputError unless it holds a mapping, even where dict() would accept it."""

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        data: Any = read_yaml(Path(file_path)) or {}
        if not isinstance(data, dict):
            raise InputError(
                f"The configuration {file_path} must be a mapping of settings, such as `triton: 127.0.0.1:8001`."
            )
        return {str(key): value for key, value in data.items()}


@dataclass(frozen=True)
class SettingsLayers:
    """Settings in place of a file's: each mapping is over those after it. `place` is where they come from. `alone`:
    without those of the environment, which is not the one that they are for."""

    place: str
    mappings: tuple[Mapping[str, Any], ...]
    alone: bool = False


def load_settings(config: Path | SettingsLayers | None = None, **flags: Any) -> GatewaySettings:
    """Settings from flags (None: not given), environment and `config`. Raises InputError naming the key."""
    _reject_misspelt_environment()
    path, layers = (config, ()) if not isinstance(config, SettingsLayers) else (None, config.mappings)
    alone = isinstance(config, SettingsLayers) and config.alone

    class Configured(GatewaySettings):
        model_config = SettingsConfigDict(yaml_file=path)

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: Any, **named: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            usual = () if alone else super().settings_customise_sources(settings_cls, *sources, **named)
            return *usual, *(InitSettingsSource(settings_cls, init_kwargs=dict(layer)) for layer in layers)

    place = config.place if isinstance(config, SettingsLayers) else config
    try:
        if path is not None:
            # the source passes over what is no file
            read_yaml(path)
        return Configured(**{name: value for name, value in flags.items() if value is not None})
    except SettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        name = PREFIX + field[1].upper() if field else "An environment variable of the gateway"
        raise InputError(
            f"The environment variable {name} is not JSON, which this setting needs in the environment; correct it."
        ) from error
    except ValidationError as error:
        where = f"flags, environment or {place}" if place else "flags or environment"
        raise InputError(explain_settings_error(error, GatewaySettings, where, "docs/gateway.md")) from error


def _reject_misspelt_environment() -> None:
    """LLMOPS_ variables belong to other commands too, so only what looks like one of the gateway's is refused."""
    known = [PREFIX + name.upper() for name in GatewaySettings.model_fields]
    for name in os.environ:
        stem = name.split("__")[0]
        if not name.startswith(PREFIX) or stem in known:
            continue
        meant = difflib.get_close_matches(stem, known, n=1, cutoff=0.85)
        if meant:
            raise InputError(f"The environment variable {name} is an unknown setting; did you mean {meant[0]}?")


def explain_settings_error(error: ValidationError, kind: type[BaseModel], where: str, docs: str) -> str:
    """The first place at which settings do not fit `kind`, in a sentence; an unknown one with the nearest there is."""
    faults = error.errors()
    # a name that is misspelt makes others missing
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    key = ".".join(str(part) for part in first["loc"])
    where = f" ({where})" if where else ""
    if first["type"] != "extra_forbidden":
        key, clause = explain_first_error(faults)
        return f"The setting `{key}`{where} is not usable: {clause}."
    *section, name = first["loc"]
    meant = difflib.get_close_matches(str(name), _names_in(kind, section), n=1)
    nearest = f"did you mean `{meant[0]}`? " if meant else ""
    return f"Unknown setting `{key}`{where}; {nearest}{docs} lists those there are."


def _names_in(kind: Any, section: Sequence[str | int]) -> list[str]:
    """The settings of a section, or all sections; what is in a dict of sections has any name."""
    for part in section:
        kind = kind.model_fields[part].annotation if hasattr(kind, "model_fields") else get_args(kind)[-1]
        # `Section | None`
        kind = next((one for one in get_args(kind) if hasattr(one, "model_fields")), kind) if _is_union(kind) else kind
    return list(kind.model_fields)


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)
