"""A cache of rejections, so that early retries need no reservation and no tokenization."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from llmops.gateway.errors import RateLimitError

#: Maximum number of cached callers. Beyond it, the caller that was rejected longest ago is dropped.
MAX_CALLERS = 10_000
#: Maximum number of cached rejections of one caller, each for another body size.
MAX_REJECTIONS_PER_CALLER = 16


class RejectionCache:
    """The latest rejections of each caller, with the time until which they apply.

    A request of at least the same size is rejected with the same error; a smaller request may pass.
    """

    def __init__(self) -> None:
        self._callers: OrderedDict[str, OrderedDict[int, tuple[float, RateLimitError]]] = OrderedDict()

    def __contains__(self, caller: str) -> bool:
        return caller in self._callers

    def note(self, caller: str, size: int, until: float, error: RateLimitError) -> None:
        """Cache a rejection.

        Args:
            caller: The caller's name.
            size: Bytes of the request's body; 0 if the rejection applies to requests of any size.
            until: The time at which the wait ends, in seconds of the clock given to `find`.
            error: The error that the client got.
        """
        refusals = self._callers.setdefault(caller, OrderedDict())
        self._callers.move_to_end(caller)
        refusals[size] = (until, error)
        if len(refusals) > MAX_REJECTIONS_PER_CALLER:
            refusals.popitem(last=False)
        if len(self._callers) > MAX_CALLERS:
            self._callers.popitem(last=False)

    def find(self, caller: str, size: int, clock: Callable[[], float]) -> tuple[float, RateLimitError] | None:
        """Return the seconds left and the error of the rejection with the longest wait, or None.

        Args:
            caller: The caller's name.
            size: Bytes of the request's body.
            clock: Returns the time in seconds.
        """
        refusals = self._callers.get(caller)
        if refusals is None:
            return None
        now = clock()
        for over in [least for least, (until, _) in refusals.items() if until <= now]:
            del refusals[over]
        if not refusals:
            del self._callers[caller]
        waits = [(until - now, error) for least, (until, error) in refusals.items() if size >= least]
        return max(waits, key=lambda entry: entry[0], default=None)
