"""A limit on the buffered bodies of open requests, shared fairly among clients."""

from __future__ import annotations

from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome
from llmops.gateway.ratelimit.fairness import FairShares


class BufferedBytes(Check):
    """A check that limits the bytes of buffered request bodies in one gateway worker.

    Any client can take the first half of the bytes. No client can take all of the second half.
    """

    def __init__(self, most: int) -> None:
        self._free = most // 2
        self._bytes = FairShares(most - self._free)

    @property
    def held(self) -> int:
        """Return the buffered bytes of all open requests."""
        return self._bytes.taken

    def take(self, size: int, context: RequestContext) -> None:
        """Add `size` bytes to the buffered bytes of the request. A lone request is never too large.

        Raises:
            UnavailableError: The limit of the gateway or the fair share of this client is reached.
        """
        held = self._bytes
        held.free = self._free if held.taken > context.buffered_bytes else context.buffered_bytes + size
        if not held.take(context.caller.share, size):
            raise UnavailableError(
                "The gateway holds as many request bodies as it can, in total or from this client; try again.",
                code="overloaded",
                retry_after=1.0,
            )
        context.buffered_bytes += size

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        if context.buffered_bytes:
            self._bytes.give_back(context.caller.share, context.buffered_bytes)
            context.buffered_bytes = 0
