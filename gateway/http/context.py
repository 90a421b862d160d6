"""What belongs to one HTTP request besides its body: its id, when it arrived, and the headers its answer must carry."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from time import perf_counter

from starlette.requests import Request
from starlette.types import Scope

KEY = "llmops"
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """`started` is perf_counter() at arrival; `waited` are the seconds spent waiting for the engine."""

    request_id: str
    started: float = field(default_factory=perf_counter)
    waited: float = 0.0
    ignored: list[str] = field(default_factory=list)

    @property
    def overhead(self) -> float:
        """Seconds since the arrival that were not spent waiting for the engine."""
        return max(perf_counter() - self.started - self.waited, 0.0)

    def headers(self) -> dict[str, str]:
        """x-request-id, openai-processing-ms, the gateway's own part of it, and what was ignored."""
        total = perf_counter() - self.started
        headers = {
            "x-request-id": self.request_id,
            "openai-processing-ms": str(round(total * 1000)),
            "x-llmops-overhead-ms": f"{self.overhead * 1000:.2f}",
        }
        if self.ignored:
            headers["x-llmops-ignored"] = ", ".join(self.ignored)
        return headers


def new_context(client_id: str | None) -> RequestContext:
    """A client's own x-request-id is kept when it is printable and short."""
    if client_id is not None and _ID.fullmatch(client_id):
        return RequestContext(client_id)
    return RequestContext("req_" + secrets.token_hex(16))


def context_of(request: Request) -> RequestContext:
    return context_in(request.scope)


def context_in(scope: Scope) -> RequestContext:
    context = scope.get(KEY)
    if context is None:
        context = scope[KEY] = new_context(None)
    assert isinstance(context, RequestContext)
    return context
