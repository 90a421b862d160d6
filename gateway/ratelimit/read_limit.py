"""A rate limit for requests that generate nothing: they read, delete or cancel.

Such requests cost no tokens and count against no quota. Each caller has a separate rate for them in
each worker, and may have only a few of them open: each reader of a running answer costs as much as
the answer.
"""

from __future__ import annotations

import math
from time import monotonic

from starlette.types import Scope

from llmops.gateway.errors import RateLimitError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome
from llmops.gateway.ratelimit.rate_limit_check import caller_name

#: Routes without this limit: their cost does not grow with the number of clients, because their
#: answers are shared or constant.
_SHARED = frozenset({"/", "/health", "/health/live", "/health/ready", "/metrics"})
#: Seconds of unused rate that a caller may use at once, as a burst of requests.
_BURST = 2.0
#: Maximum number of open reads of a caller. Each reader of a running answer costs as much as the
#: answer.
MAX_OPEN_READS = 64
#: Maximum number of callers whose rates are remembered. Beyond it, all start with a full burst
#: again.
_MAX_CALLERS = 10_000


class ReadLimit(Check):
    """A check that limits each caller to `rate` requests per second that generate nothing.

    The limit applies to all methods except POST, to cancellations, and to changes of the visible
    branch, which are answered with a whole conversation.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        # Time by caller at which the caller's whole burst will be available again.
        self._full_at: dict[str, float] = {}
        self._open: dict[str, set[RequestContext]] = {}

    def applies_to(self, method: str, route: str) -> bool:
        return (method != "POST" or route.endswith(("/cancel", "/branch"))) and route not in _SHARED

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Count a request that generates nothing.

        Raises:
            RateLimitError: The caller's rate is exceeded, or too many of the caller's reads are
                open.
        """
        name, now = caller_name(context.caller), monotonic()
        full_at = max(self._full_at.get(name, now), now) + 1 / self._rate
        wait = full_at - now - _BURST
        if wait > 0:
            raise RateLimitError(
                f"The limit is {self._rate:g} requests per second that read, delete or cancel; try again in "
                f"{math.ceil(wait * 1000)} ms. The operator can change the gateway's setting limits.reads_per_second.",
                retry_after=wait,
            )
        if name not in self._full_at and len(self._full_at) >= _MAX_CALLERS:
            self._full_at.clear()
        self._full_at[name] = full_at
        if scope["method"] != "GET" and not context.route.endswith("/branch"):
            return  # This request ends soon, and may cancel an answer that the open reads follow.
        reads = self._open.setdefault(name, set())
        if len(reads) >= MAX_OPEN_READS:
            raise RateLimitError(
                f"{MAX_OPEN_READS} requests of this caller that read are open, which is the limit; close some of them, "
                "and try again.",
                retry_after=1.0,
            )
        reads.add(context)

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        name = caller_name(context.caller)
        reads = self._open.get(name)
        if reads is not None:
            reads.discard(context)
            if not reads:
                del self._open[name]
