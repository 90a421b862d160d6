"""A bound on the buffered bodies of open requests, shared fairly among clients."""

from __future__ import annotations

from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome
from llmops.gateway.ratelimit.fairness import FairShares


class BufferedBytes(Check):
    """A check that bounds the bytes of request bodies in one gateway worker.

    Half of the bytes can be taken by any client. No client can take all of the other half.
    """

    def __init__(self, most: int) -> None:
        self._free = most // 2
        self._bytes = FairShares(most - self._free)

    @property
    def held(self) -> int:
        """Return the bytes of all open requests."""
        return self._bytes.taken

    def take(self, size: int, context: RequestContext) -> None:
        """Count `size` more bytes of the request.

        A request that is alone is never too large.

        Raises:
            UnavailableError: The gateway holds as many bytes as it may, in total or of this client.
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
