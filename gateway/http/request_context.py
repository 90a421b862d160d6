"""The context of an HTTP request: caller, headers, timings, and how the request ended.

The middleware creates a context per request. Endpoints and checks read and write it. When the
request has ended, metrics, traces, the access log and usage records are created from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from ipaddress import IPv6Address
from time import perf_counter

from starlette.requests import Request
from starlette.types import Scope

from llmops.clocks import utc_now
from llmops.gateway.interfaces import (
    Caller,
    DegradedLimits,
    Failover,
    QuotaReservation,
    SchedulingParams,
    Usage,
    UsageRecorder,
)
from llmops.gateway.telemetry.metrics import AnswerMeter
from llmops.gateway.telemetry.trace_context import TraceContext

CONTEXT_KEY = "llmops"
UNKNOWN_CALLER = Caller()
#: Maximum size of the header `x-llmops-warnings`, in bytes. Many proxies allow 4 KiB for all
#: headers of a response together.
MAX_WARNING_BYTES = 1500
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(slots=True, eq=False)
class RequestContext:
    """The state of an HTTP request, without its body.

    Attributes:
        request_id: The client's `x-request-id` if it is short and printable, else a generated id.
        route: The path template of the matched route, empty if no route matched.
        caller: The authenticated caller, or an anonymous caller.
        unauthenticated: True while a key is looked up, and for routes that need no key: the
            connection may be closed to make room for another.
        headers: The request's headers. For repeated names, the first value.
        started: The time of `perf_counter()` when the request arrived.
        arrived: The date and time when the request arrived, whose price applies; for an answer that
            was taken over, at the gateway that began the answer.
        engine_seconds: The seconds spent waiting for the engine.
        detokenize_seconds: The seconds spent turning the engine's tokens into text.
        ignored_fields: The fields of the body without effect, for the header `x-llmops-ignored`.
        warnings: Sentences for the client, for the header `x-llmops-warnings`.
        stages: The seconds that each stage took, by the stage's name, in order: parse, queue,
            template, tokenise, submit.
        stage_ended: The time of `perf_counter()` at the last `mark`, 0 before the first.
        work_bytes: The size of the text to process, in bytes: the body's, or that of a stored
            conversation if it is larger.
        buffered_bytes: The bytes that count against `limits.held_bytes` until the request ends.
        overhead_seconds: The seconds until the response started that were not spent waiting for the
            engine; 0 before the response starts.
        fairness_id: The end user for whom the caller sends this request, from a header; empty if
            the request has no such header.
        end_user: The end user that the body names, empty if the body names none.
        prompt_cache_key: The body's name for requests that share a prefix, empty if there is none.
        service_tier: The tier that the body requested and received, else `default`.
        ttft_target: The seconds from arrival within which the first token is due, from a header.
        reservation: The quota reserved for this request, None if the caller has no quotas.
        usage_recorder: Records the request's usage for billing, None if usage is not recorded.
        model: The model's name, empty until it is known.
        alias_of: The model that answers a request for an alias, for the header `x-llmops-model`.
        route_reason: The reason why an alias chose its model, for the header `x-llmops-route`.
        degraded: The restrictions of degraded mode, None if the model is not degraded.
        meter: Measures the answer's latencies, None before the answer exists.
        trace: The data of this request's trace, None if traces are off.
        traceparent: W3C's trace header for the engine's server, empty if the request is not traced.
        usage: The tokens that the request used, None if it used no tokens.
        finish_reason: The reason for the end of the request (see `Outcome.finish`), empty until it
            is known.
        splice: `exact` or `approximate` if the answer failed over to another replica, else empty.
        dropped_messages: The number of messages of a stored conversation that did not fit into the
            model's context.
        replica: The id of the replica that served the answer.
        version: The version of the model that answers, for the header `x-llmops-version`; empty for
            a model without versions.
        describe_answer: Returns properties of the answer's text, for the comparison of versions in
            a rollout.
        failovers: The failovers of the answer to other replicas, in order.
        background_task: A task that continues after the response. The request ends when this task
            ends.
    """

    request_id: str
    route: str = ""
    caller: Caller = UNKNOWN_CALLER
    unauthenticated: bool = False
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    started: float = field(default_factory=perf_counter)
    arrived: datetime = field(default_factory=utc_now)
    engine_seconds: float = 0.0
    detokenize_seconds: float = 0.0
    ignored_fields: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    stage_ended: float = 0.0
    work_bytes: int = 0
    buffered_bytes: int = 0
    overhead_seconds: float = 0.0
    fairness_id: str = ""
    end_user: str = ""
    prompt_cache_key: str = ""
    service_tier: str = "default"
    ttft_target: float = math.inf
    reservation: QuotaReservation | None = None
    usage_recorder: UsageRecorder | None = None
    model: str = ""
    alias_of: str = ""
    route_reason: str = ""
    degraded: DegradedLimits | None = None
    meter: AnswerMeter | None = None
    trace: TraceContext | None = None
    traceparent: str = ""
    usage: Usage | None = None
    finish_reason: str = ""
    splice: str = ""
    dropped_messages: int = 0
    replica: str = ""
    version: str = ""
    describe_answer: Callable[[], Mapping[str, bool]] = dict
    failovers: Sequence[Failover] = ()
    background_task: asyncio.Task[None] | None = None

    @property
    def scheduling(self) -> SchedulingParams:
        """Return the tenant, tier, arrival and deadline, which determine the place in queues."""
        tenant = self.caller.share.partition("/")[0]
        if self.fairness_id:
            tenant = f"{tenant}/{self.fairness_id}"
        return SchedulingParams(tenant, self.caller.tier, self.started, self.started + self.ttft_target)

    async def count_request(self, model: str) -> None:
        """Take a request, and no tokens, from the quotas of a model that generates nothing for it.

        Raises:
            RateLimitError: The caller has used a quota up.
        """
        if self.reservation is not None:
            await self.reservation.tokens(model, 0)

    def mark(self, stage: str) -> None:
        """Record the seconds since the end of the previous stage as the duration of `stage`."""
        now = perf_counter()
        self.stages[stage] = now - (self.stage_ended or self.started)
        self.stage_ended = now

    def response_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response to any routed request, and record the overhead.

        Called when a response starts, so the headers of a stream do not have values that are known
        later.
        """
        total = perf_counter() - self.started
        self.overhead_seconds = max(total - self.engine_seconds, 0.0)
        headers = [
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % round(total * 1000)),
            (b"x-llmops-overhead-ms", b"%.2f" % (self.overhead_seconds * 1000)),
        ]
        if self.reservation is not None:
            headers += self.reservation.headers()
        if self.ignored_fields:
            headers.append((b"x-llmops-ignored", ", ".join(self.ignored_fields).encode()))
        if self.warnings:
            headers.append((b"x-llmops-warnings", _header_value(self.warnings)))
        if self.alias_of:
            headers.append((b"x-llmops-model", self.alias_of.encode()))
        if self.route_reason:
            headers.append((b"x-llmops-route", self.route_reason.encode()))
        if self.version:
            headers.append((b"x-llmops-version", self.version.encode()))
        if self.degraded is not None:
            headers.append((b"x-llmops-degraded", b"%d" % self.degraded.level))
        if self.dropped_messages:
            headers.append((b"x-llmops-dropped-messages", b"%d" % self.dropped_messages))
        if self.splice:
            headers.append((b"x-llmops-continued", self.splice.encode()))
        return headers


def _header_value(sentences: Sequence[str]) -> bytes:
    """Return the value of a header that contains `sentences`.

    Characters that are not printable ASCII are escaped.
    """
    text = " ".join(sentences)
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable.encode("ascii", "backslashreplace")[:MAX_WARNING_BYTES]


def create_context(scope: Scope) -> RequestContext:
    """Create a request's context with an anonymous caller, and store it in the ASGI `scope`."""
    headers = dict(reversed(scope.get("headers", ())))
    sent = headers.get(b"x-request-id", b"")
    request_id = sent.decode() if _REQUEST_ID.fullmatch(sent) else "req_" + secrets.token_hex(16)
    credential = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
    # Only a digest is kept, because the key itself must not appear in logs or records.
    digest = hashlib.sha256(credential).hexdigest() if credential else ""
    caller = anonymous_caller((scope.get("client") or ("",))[0], digest)
    context = scope[CONTEXT_KEY] = RequestContext(request_id, caller=caller, headers=headers)
    return context


def context_of(request: Request | Scope) -> RequestContext:
    """Return the context of a request or of its scope.

    A context is created if the application runs without the middleware.
    """
    scope = request.scope if isinstance(request, Request) else request
    context = scope.get(CONTEXT_KEY)
    return context if isinstance(context, RequestContext) else create_context(scope)


def client_network(host: str) -> str:
    """Return the network that counts as one client.

    The network of an IPv4 address is the address itself. The network of an IPv6 address is its /64.
    """
    if ":" not in host:
        return host
    address = IPv6Address(host)
    return str(address.ipv4_mapped or IPv6Address(address.packed[:8] + bytes(8)))


@lru_cache(maxsize=4096)
def anonymous_caller(host: str, digest: str) -> Caller:
    """Return the anonymous caller at an address.

    Args:
        host: The address.
        digest: The digest of the API key that was sent, which distinguishes callers at one address;
            empty without a key.
    """
    client = client_network(host)
    return Caller(user_id=digest, share=f"{client}/{digest[:16]}" if digest else client)
