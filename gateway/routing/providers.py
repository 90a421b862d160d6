"""Other OpenAI-compatible providers, to which chats overflow when an alias has no room left.

A provider's model is named `PROVIDER/MODEL`. Under this name, it has a price, a line in usage
reports, and a place at the end of an alias. A provider's key is read at startup and never appears
in messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, field_validator
from pydantic_core import to_json

from llmops.errors import InputError
from llmops.fair_client import fair_client
from llmops.gateway.errors import ApiError, CancelledStreamError, UnavailableError
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import (
    Capabilities,
    Engine,
    EngineRequest,
    GuideKind,
    ModelMetadata,
    TokenBatch,
    TokenStream,
    Usage,
)
from llmops.gateway.ratelimit.slots import FairSlots
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.settings import EVERY_TENANT, GatewaySettings, ProviderSettings
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.urls import is_usable_key

#: Header of requests that another gateway sends to this gateway as a provider. Such requests are
#: not sent to a provider again, which prevents loops.
OVERFLOW_HEADER = "x-llmops-overflow"
#: UTF-8 bytes that are counted as one token until the provider reports its count. English text has
#: about four bytes per token; three reserve a little more than is used.
BYTES_PER_TOKEN = 3
#: Maximum number of tokens that a provider's chat template is assumed to add to a request, which
#: bounds the prompt tokens that the provider can charge.
TEMPLATE_TOKENS = 1024
#: Maximum size of a line in a provider's stream, in bytes. A delta has a few hundred bytes.
MAX_LINE_BYTES = 1 << 20
#: Maximum number of events that wait for the client, which bounds the memory for a slow client.
#: While as many wait, the provider's connection is not read.
MAX_WAITING_EVENTS = 64
#: Maximum seconds of a provider's `retry-after` that are passed on to clients, because models here
#: may have room sooner.
MAX_RETRY_AFTER = 60.0
#: Maximum seconds to wait for a response's end after its last event, `[DONE]`. Only a connection
#: whose response has ended is used again.
END_TIMEOUT = 0.1
#: Seconds for which an unused connection is kept: less than the 5 s after which uvicorn closes it.
KEEP_ALIVE = 4.0


class ProviderError(ApiError):
    """A 502 response: the answer of a provider cannot be used."""

    status = 502
    type = "server_error"
    code = "provider_failed"
    should_retry = True


class _Chunk(BaseModel):
    """A part of a provider's stream. Unknown fields are ignored, and wrong types are an error."""

    model_config = ConfigDict(strict=True, extra="ignore")


class FunctionPart(_Chunk):
    """The function of a tool call."""

    name: str | None = None
    arguments: str | None = None


class CallPart(_Chunk):
    """A part of a tool call in a delta."""

    index: int = Field(default=0, ge=0, lt=1024)
    id: str | None = None
    function: FunctionPart = FunctionPart()


class ProviderDelta(_Chunk):
    """The part of a message that a chunk adds."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallPart] | None = None


class ChunkChoice(_Chunk):
    """The part of a choice that a chunk adds."""

    index: int = Field(default=0, ge=0)
    delta: ProviderDelta = ProviderDelta()
    finish_reason: str | None = None


class _PromptDetails(_Chunk):
    cached_tokens: int | None = Field(default=None, ge=0)


class _CompletionDetails(_Chunk):
    reasoning_tokens: int | None = Field(default=None, ge=0)


class _Counts(_Chunk):
    prompt_tokens: int = Field(ge=0, lt=2**31)
    completion_tokens: int = Field(default=0, ge=0, lt=2**31)
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    def usage(self) -> Usage:
        cached = self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None
        reasoning = (self.completion_tokens_details or _CompletionDetails()).reasoning_tokens or 0
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            min(reasoning, self.completion_tokens),
            None if cached is None else min(cached, self.prompt_tokens),
        )


class _ProviderChunk(_Chunk):
    error: Any = None
    usage: _Counts | None = None
    choices: list[ChunkChoice] = Field(default_factory=list)

    @field_validator("usage", mode="wrap")
    @classmethod
    def _without_unusable_counts(cls, usage: Any, validate: ValidatorFunctionWrapHandler) -> _Counts | None:
        """Drop counts of wrong types or sizes: the answer beside them is whole, and is estimated."""
        try:
            return cast(_Counts | None, validate(usage))
        except ValidationError:
            return None


class ProviderBatch(TokenBatch):
    """A batch that holds a provider's chunk for one choice instead of tokens."""

    choice: ChunkChoice

    @classmethod
    def of(cls, choice: ChunkChoice) -> ProviderBatch:
        """Return the batch for one choice of a chunk."""
        batch = cls(choice.index, ())
        batch.choice = choice
        return batch


@dataclass(frozen=True, slots=True)
class ProviderModel(GenerativeModel):
    """A model of a provider. This gateway has no tokenizer, template or engine for the model."""

    provider: Provider | None = None
    upstream_name: str = ""

    def open(self, body: Mapping[str, Any], caller: str) -> ProviderStream:
        """Send a chat request when it is the turn of `caller`, which is a `Caller.share`.

        The returned stream has the deltas of the answer.
        """
        assert self.provider is not None
        return ProviderStream(self.provider, {**body, "model": self.upstream_name}, self.card.max_seq_len, caller)


class Provider:
    """A provider, with its key and the connections to it.

    Attributes:
        hides_cached_tokens: True if counts of cached tokens would tell tenants what others asked,
            because the provider has one prefix cache for all requests with its key.
    """

    def __init__(self, name: str, settings: ProviderSettings, connect: float, tenants_apart: bool = False) -> None:
        """Create a provider and read its key.

        Args:
            name: Name of the provider in the settings.
            settings: Settings of the provider.
            connect: Maximum seconds for connecting.
            tenants_apart: True if tenants do not share cached prefixes.

        Raises:
            InputError: The key cannot be read.
        """
        self.name, self.settings = name, settings
        self.hides_cached_tokens = tenants_apart and (len(settings.tenants) > 1 or EVERY_TENANT in settings.tenants)
        self.slots = FairSlots(settings.concurrent)
        key = _read_key(name, settings)
        headers = {"accept": "text/event-stream", "accept-encoding": "identity", OVERFLOW_HEADER: "1"}
        self.client = fair_client(
            headers={**headers, **({"authorization": f"Bearer {key}"} if key else {})},
            timeout=httpx.Timeout(float(settings.timeout), connect=connect),
            limits=httpx.Limits(max_connections=settings.concurrent, keepalive_expiry=KEEP_ALIVE),
        )

    @property
    def url(self) -> str:
        """Return the URL of chat completions."""
        return f"{self.settings.url.rstrip('/')}/chat/completions"

    def model(self, name: str) -> ProviderModel:
        """Return the provider's model `name`."""
        full_name = f"{self.name}/{name}"
        card = ModelMetadata(
            name=full_name,
            target=f"provider {self.name}",
            tokenizer_dir="",
            max_seq_len=self.settings.context,
            vocab_size=1,
            end_ids=(),
            max_batch_size=self.settings.concurrent,
            # capabilities are not limited here: translating a request finds what the provider
            # cannot do
            capabilities=Capabilities(
                logprobs=True,
                top_logprobs=20,
                prompt_logprobs=True,
                logit_bias=True,
                n=8,
                guided=get_args(GuideKind),
                bad_words=True,
                min_p=True,
            ),
        )
        tokenizer = cast(TextTokenizer, _EstimatingTokenizer())
        return ProviderModel(full_name, card, tokenizer, None, _NoEngine(), provider=self, upstream_name=name)


class Providers:
    """The providers of a gateway.

    Attributes:
        models: The providers' models that each alias falls back to, by alias. An alias without such
            models is missing.
    """

    def __init__(self, settings: GatewaySettings | None = None) -> None:
        """Read the providers' keys.

        Raises:
            InputError: A key cannot be read.
        """
        self._providers: dict[str, Provider] = {}
        self.models: dict[str, list[ProviderModel]] = {}
        if settings is None:
            return
        for name, one in settings.providers.items():
            self._providers[name] = Provider(name, one, settings.timeouts.connect, settings.tenants_apart)
        for alias, models in settings.provider_aliases.items():
            named = [one.split("/", 1) for one in models]
            self.models[alias] = [self._providers[provider].model(model) for provider, model in named]

    def find(self, alias: str, context: RequestContext) -> ProviderModel | None:
        """Return the first of the alias's models that may answer a request, or None."""
        if OVERFLOW_HEADER.encode() in context.headers:
            return None
        caller = context.caller
        for model in self.models[alias]:
            assert model.provider is not None
            tenants = model.provider.settings.tenants
            if (caller.may_use(alias) or caller.may_use(model.name)) and (
                EVERY_TENANT in tenants or (caller.tenant_id and caller.tenant_id in tenants)
            ):
                return model
        return None

    async def close(self) -> None:
        """Close all connections."""
        for provider in self._providers.values():
            await provider.client.aclose()


def bounded_usage(usage: Usage, body: Mapping[str, Any], context_tokens: int) -> Usage:
    """Return a provider's token counts, limited to counts that the request can have caused.

    The caller's budget has reserved the prompt and the longest possible answer, and the caller pays
    the returned counts.

    Args:
        usage: The counts of the provider.
        body: The request as it was sent.
        context_tokens: Maximum number of tokens of the prompt, and of each choice.
    """
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    longest = context_tokens if limit is None else min(limit, context_tokens)
    answer = min(usage.completion_tokens, longest * body.get("n", 1))
    prompt = min(usage.prompt_tokens, context_tokens)
    if prompt > TEMPLATE_TOKENS:
        prompt = min(prompt, TEMPLATE_TOKENS + len(to_json(body)))
    cached = None if usage.cached_tokens is None else min(usage.cached_tokens, prompt)
    return Usage(prompt, answer, min(usage.reasoning_tokens, answer), cached)


class ProviderStream(TokenStream):
    """The deltas of an answer of a provider.

    Attributes:
        usage: The token counts that the provider reported for the whole answer, or None before the
            stream's end.
    """

    def __init__(self, provider: Provider, body: Mapping[str, Any], context_tokens: int, caller: str) -> None:
        """Send the request. Reading the stream raises all errors, including connection errors."""
        self.usage: Usage | None = None
        self._provider, self._body, self._context_tokens, self._caller = provider, body, context_tokens, caller
        self._events: asyncio.Queue[ProviderBatch | ApiError | None] = asyncio.Queue(MAX_WAITING_EVENTS)
        self._cancelled = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"provider-{provider.name}")

    @property
    def replica(self) -> str:  # type: ignore[override]
        """Return the provider's name."""
        return self._provider.name

    async def __anext__(self) -> TokenBatch:
        if self._cancelled.is_set():
            raise CancelledStreamError
        event = await self._events.get()
        if event is None and self._cancelled.is_set():
            raise CancelledStreamError
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, ApiError):
            raise event
        return event

    def cancel(self) -> None:
        """Close the connection, which makes the provider stop generating."""
        if not self._cancelled.is_set():
            self._cancelled.set()
            self._task.cancel()
            while not self._events.empty():
                self._events.get_nowait()
            self._events.put_nowait(None)

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(float(self._provider.settings.timeout)):
                await self._provider.slots.enter(self._caller)
            try:
                await self._read()
            finally:
                self._provider.slots.leave()
            await self._events.put(None)
        except ApiError as error:
            await self._events.put(error)
        except TimeoutError as error:
            await self._events.put(self._away(error, "has no free connection"))
        except httpx.TimeoutException as error:
            await self._events.put(self._away(error, "sent nothing in time"))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            await self._events.put(self._away(error, "cannot be reached, or closed the connection"))
        except (ValidationError, ValueError) as error:
            what = f"{error.error_count()} wrong fields" if isinstance(error, ValidationError) else str(error)
            await self._events.put(self._unusable(what))

    async def _read(self) -> None:
        provider, finished, counts = self._provider, False, None
        async with provider.client.stream("POST", provider.url, json=self._body) as response:
            if response.status_code != 200:
                raise self._refusal(response)
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise self._unusable(f"the content type is {kind[:60]!r}")
            lines = _lines(response)
            async for line in lines:
                if line == b"data: [DONE]":
                    finished = True
                    break
                if not line.startswith(b"data:"):
                    continue
                chunk = _ProviderChunk.model_validate_json(line[5:])
                if chunk.error is not None:
                    raise self._unusable("the stream has an error event")
                finished = finished or any(choice.finish_reason is not None for choice in chunk.choices)
                # Counts that a later part of the answer does not repeat leave that part out.
                if chunk.usage is not None or not finished:
                    counts = chunk.usage
                for choice in chunk.choices:
                    if choice.index >= self._body.get("n", 1):
                        raise self._unusable("the stream has a choice that was not requested")
                    await self._events.put(ProviderBatch.of(choice))
            if not finished:
                raise self._unusable("the stream ended before the answer was complete")
            if counts is not None:
                self.usage = bounded_usage(counts.usage(), self._body, self._context_tokens)
                if self._provider.hides_cached_tokens:
                    self.usage = self.usage._replace(cached_tokens=None)
            await _read_end(lines)

    def _refusal(self, response: httpx.Response) -> ApiError:
        """Return the error for a status other than 200.

        The body is not read, because it may repeat the key.
        """
        status, name = response.status_code, self._provider.name
        if status in (429, 503, 529):
            wait = _retry_after(response.headers.get("retry-after", ""))
            return UnavailableError(
                f"The models of this gateway and the provider {name} are busy; try again later.",
                code="provider_busy",
                retry_after=wait,
            )
        if status in _REJECTIONS:
            message = (
                f"The provider {name}, to which this request overflowed, rejected it with status {status}; "
                "correct the request, or try again later."
            )
            return ProviderError(message, should_retry=False)
        return self._unusable(f"the status is {status}")

    def _unusable(self, detail: str) -> ApiError:
        name = self._provider.name
        message = f"The provider {name}, to which this request overflowed, gave no usable answer; try again."
        return ProviderError(message, detail=detail)

    def _away(self, error: Exception, what: str) -> ApiError:
        name = self._provider.name
        return UnavailableError(
            f"The provider {name}, to which this request overflowed, {what}; try again.",
            code="provider_unavailable",
            detail=type(error).__name__,
        )


#: Statuses with which a provider rejects the request itself. For other statuses, the provider or
#: its key is at fault.
_REJECTIONS = frozenset({400, 413, 422})


class _NoEngine(Engine):
    """The engine of a provider's model, which rejects all requests.

    Chats reach a provider through `ProviderModel.open` instead.
    """

    async def open(self, request: EngineRequest) -> TokenStream:
        raise UnavailableError("A provider answers chats only; send the request to /v1/chat/completions.")


class _EstimatingTokenizer:
    """A tokenizer that only estimates the number of tokens, for shortening a long history."""

    def encode_beginning(self, text: str, _tokens: int, **_options: Any) -> Sequence[int]:
        return range(estimate_tokens(text))


def estimate_tokens(text: str) -> int:
    """Return an estimate of a text's tokens, rounded up."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def _read_key(name: str, settings: ProviderSettings) -> str:
    """Return the provider's key, or "" if the settings name no key. Raises InputError."""
    if settings.key_file is not None:
        try:
            key, place = settings.key_file.read_text().strip(), f"the file {settings.key_file}"
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise InputError(
                f"The key of the provider {name} cannot be read from {settings.key_file} ({reason}); "
                "correct the file or the setting key_file."
            ) from None
    elif settings.key_env is not None:
        key, place = os.environ.get(settings.key_env, "").strip(), f"the environment variable {settings.key_env}"
    else:
        return ""
    if not is_usable_key(key):
        raise InputError(
            f"The provider {name} has no usable key in {place}; store a key of printable ASCII characters there, or "
            "correct the setting."
        )
    return key


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a response without line ends. Raises ValueError for too long a line."""
    rest = bytearray()
    async for data in response.aiter_raw():
        *ends, begun = data.split(b"\n")
        for end in ends:
            yield bytes(rest + end).rstrip(b"\r")
            rest.clear()
        rest += begun
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"the stream has a line of more than {MAX_LINE_BYTES} bytes")


async def _read_end(lines: AsyncIterator[bytes]) -> None:
    with contextlib.suppress(TimeoutError, ValueError, httpx.HTTPError):
        async with asyncio.timeout(END_TIMEOUT):
            async for _ in lines:
                pass


def _retry_after(text: str) -> float:
    return min(float(text), MAX_RETRY_AFTER) if text.isascii() and text.isdecimal() else 2.0
