"""The bodies of requests that are not over, of which no client can hold all that there is room for."""

from __future__ import annotations

from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome
from llmops.gateway.ratelimit.fairness import FairShares


class BufferedBytes(Check):
    """Those of one gateway worker.

    One half of the bytes is anybody's; of the other nobody gets all.
    """

    def __init__(self, most: int) -> None:
        self._free = most // 2
        self._bytes = FairShares(most - self._free)

    @property
    def held(self) -> int:
        """Bytes."""
        return self._bytes.taken

    def take(self, size: int, context: RequestContext) -> None:
        """So many more bytes of the request.

        Raises UnavailableError; a request alone is never too large.
        """
        held = self._bytes
        held.free = self._free if held.taken > context.buffered_bytes else context.buffered_bytes + size
        if not held.take(context.caller.share, size):
            raise UnavailableError(
                "The gateway is holding as many requests as it can, or as many of one client as it may; try again.",
                code="overloaded",
                retry_after=1.0,
            )
        context.buffered_bytes += size

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        if context.buffered_bytes:
            self._bytes.give_back(context.caller.share, context.buffered_bytes)
            context.buffered_bytes = 0
