"""Callers whose wait is not over: their storms cost no reservation, and no tokenising."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from llmops.gateway.errors import RateLimitError

MAX_CALLERS = 10_000
MAX_REJECTIONS_PER_CALLER = 16


class RejectionCache:
    """What was refused to whom, until when.

    Requests of at least the same size are refused alike; smaller may pass.
    """

    def __init__(self) -> None:
        self._callers: OrderedDict[str, OrderedDict[int, tuple[float, RateLimitError]]] = OrderedDict()

    def __contains__(self, caller: str) -> bool:
        return caller in self._callers

    def note(self, caller: str, size: int, until: float, error: RateLimitError) -> None:
        """`size`: bytes of the body; 0 for a refusal that asks for nothing but the number of
        requests.
        """
        refusals = self._callers.setdefault(caller, OrderedDict())
        self._callers.move_to_end(caller)
        refusals[size] = (until, error)
        if len(refusals) > MAX_REJECTIONS_PER_CALLER:
            refusals.popitem(last=False)
        if len(self._callers) > MAX_CALLERS:
            self._callers.popitem(last=False)

    def find(self, caller: str, size: int, clock: Callable[[], float]) -> tuple[float, RateLimitError] | None:
        """The seconds that are left, and what was said; the longest of them."""
        refusals = self._callers.get(caller)
        if refusals is None:
            return None
        now = clock()
        for over in [one for one, (until, _) in refusals.items() if until <= now]:
            del refusals[over]
        if not refusals:
            del self._callers[caller]
        waits = [(until - now, error) for least, (until, error) in refusals.items() if size >= least]
        return max(waits, key=lambda found: found[0], default=None)
