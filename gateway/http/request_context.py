"""What belongs to one HTTP request besides its body: who asks, its id, when it arrived, the headers its answer must
carry, and how it ended."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from starlette.requests import Request
from starlette.types import Scope

from llmops.gateway.interfaces import Caller, Failover, QuotaReservation, SchedulingParams, Usage, UsageRecorder
from llmops.gateway.telemetry.metrics import AnswerMeter
from llmops.gateway.telemetry.trace_context import TraceContext

CONTEXT_KEY = "llmops"
UNKNOWN_CALLER = Caller()
# Bytes of the header `x-llmops-warnings`: many proxies allow 4 KiB for all headers of an answer together.
MAX_WARNING_BYTES = 1500
_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """`route` is the path template of the route that was found, empty where there is none; `caller` who asks. `given`
    are the request's headers, the first of each name.

    `ignored` are fields of the body that change nothing. `warnings` are sentences for the client about a request that
    is answered all the same: the answer's header `x-llmops-warnings` has them.

    `started` is perf_counter() at arrival; `waited`: seconds spent waiting for the engine; `detokenised`: those in
    which its tokens became text.

    `size`: bytes of its body, by which its work is counted; `held`: those that it counts for as long as it is not over.
    `stages` are the seconds that each stage took, in the order of `mark`: parse, queue, template, tokenise, submit.
    `overhead`: seconds until the answer began that were not spent waiting for the engine; 0 before.

    `fair` is on whose behalf its caller asks, `ttft` how many seconds from its arrival its first token is due: both as
    its headers say, where anybody reads them.

    `grant` is what its caller's quotas leave it, None without any; `tally` is where what it uses is written, None where
    nobody keeps that.

    `model` is the one that it is for, as soon as that is known, `meter` what follows its answer where it gets one;
    `trace` is what is noted for its trace, None where nobody traces.

    `dropped` are the messages of a stored conversation that did not fit into the model's context.

    `usage` and `finish` say how it ended (see Outcome), as soon as that is known; `continued`: of Answer; `replica` and
    `moves`: of its TokenStream. `later` is work that goes on when the answer is written: a request is over when that is
    over too.
    """

    request_id: str
    route: str = ""
    caller: Caller = UNKNOWN_CALLER
    given: Mapping[bytes, bytes] = field(default_factory=dict)
    started: float = field(default_factory=perf_counter)
    waited: float = 0.0
    detokenised: float = 0.0
    ignored: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    marked: float = 0.0
    size: int = 0
    held: int = 0
    overhead: float = 0.0
    fair: str = ""
    ttft: float = math.inf
    grant: QuotaReservation | None = None
    tally: UsageRecorder | None = None
    model: str = ""
    meter: AnswerMeter | None = None
    trace: TraceContext | None = None
    usage: Usage | None = None
    finish: str = ""
    continued: str = ""
    dropped: int = 0
    replica: str = ""
    moves: Sequence[Failover] = ()
    later: asyncio.Task[None] | None = None

    @property
    def turn(self) -> SchedulingParams:
        """When it is due, of those who wait for the same model."""
        tenant = self.caller.share.partition("/")[0]
        if self.fair:
            tenant = f"{tenant}/{self.fair}"
        return SchedulingParams(tenant, self.caller.tier, self.started, self.started + self.ttft)

    @property
    def onward(self) -> str:
        """What an engine's server is told of its trace; empty for nothing."""
        return self.trace.onward if self.trace is not None else ""

    def mark(self, stage: str) -> None:
        """`stage` ends now; it began where the last one ended."""
        now = perf_counter()
        self.stages[stage] = now - (self.marked or self.started)
        self.marked = now

    def all_stages(self) -> dict[str, float]:
        """What `overhead` was spent on, the rest of it on making the answer's bytes; and the time in the engine."""
        write = self.overhead - sum(self.stages.values()) - self.detokenised
        return {**self.stages, "upstream": self.waited, "detokenise": self.detokenised, "write": write}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of an answer that begins now: its id, the time it took, the gateway's own part of that, what was ignored."""
        total = perf_counter() - self.started
        self.overhead = max(total - self.waited, 0.0)
        headers = [
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % round(total * 1000)),
            (b"x-llmops-overhead-ms", b"%.2f" % (self.overhead * 1000)),
        ]
        if self.grant is not None:
            headers += self.grant.headers()
        if self.ignored:
            headers.append((b"x-llmops-ignored", ", ".join(self.ignored).encode()))
        if self.warnings:
            headers.append((b"x-llmops-warnings", _header_value(self.warnings)))
        if self.dropped:
            headers.append((b"x-llmops-dropped-messages", b"%d" % self.dropped))
        if self.continued:
            headers.append((b"x-llmops-continued", self.continued.encode()))
        return headers


def _header_value(sentences: Sequence[str]) -> bytes:
    """Return the value of a header that holds `sentences`; whatever is not printable ASCII is escaped."""
    text = " ".join(sentences)
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable.encode("ascii", "backslashreplace")[:MAX_WARNING_BYTES]


def create_context(given: Mapping[bytes, bytes]) -> RequestContext:
    """That of a request with these headers. A client's own x-request-id is kept when it is printable and short."""
    own = given.get(b"x-request-id", b"")
    return RequestContext(own.decode() if _ID.fullmatch(own) else "req_" + secrets.token_hex(16), given=given)


def context_of(request: Request) -> RequestContext:
    context: RequestContext = request.scope[CONTEXT_KEY]
    return context


def context_from_scope(scope: Scope) -> RequestContext:
    context = scope.get(CONTEXT_KEY)
    if context is None:
        context = scope[CONTEXT_KEY] = create_context({})
    assert isinstance(context, RequestContext)
    return context
