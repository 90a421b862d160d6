"""What clients may say of their requests' turn, in the headers that llm-d's gateways read."""

from __future__ import annotations

import math

from starlette.types import Scope

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.http.context import RequestContext
from llmops.gateway.http.door import Check
from llmops.gateway.settings import GatewaySettings

TTFT, FAIRNESS = "x-llm-d-slo-ttft-ms", "x-llm-d-inference-fairness-id"
_TTFT, _FAIRNESS = TTFT.encode(), FAIRNESS.encode()
# of a key that asks on behalf of others, each of whom gets a turn of its own
SCOPE = "fairness"
LONGEST = 128


class Hints(Check):
    """Reads them onto the context. Without the scope a fairness id is passed over: one tenant would be many."""

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Raises InvalidRequestError for a time that is none."""
        for name, value in scope["headers"]:
            if name == _TTFT:
                context.ttft = _seconds(value.decode("latin-1"))
            elif name == _FAIRNESS and SCOPE in context.caller.scopes:
                context.fair = value.decode("latin-1")[:LONGEST]


def hints_of(settings: GatewaySettings) -> list[Check]:
    """Empty where nobody waits for a turn."""
    return [Hints()] if settings.has_turns else []


def _seconds(text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise InvalidRequestError(f"The header {TTFT} is a number of milliseconds above 0, such as 500.", param=TTFT)
    return milliseconds / 1000
