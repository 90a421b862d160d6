"""Headers with a request's latency objective and fairness id, as in llm-d's gateways."""

from __future__ import annotations

import math

from starlette.types import Scope

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.settings import GatewaySettings

TTFT_HEADER, FAIRNESS_HEADER = "x-llm-d-slo-ttft-ms", "x-llm-d-inference-fairness-id"
_TTFT_HEADER_BYTES, _FAIRNESS_HEADER_BYTES = TTFT_HEADER.encode(), FAIRNESS_HEADER.encode()
#: Scope of keys that send requests for others. Each fairness id of such a key is queued like a
#: tenant.
FAIRNESS_SCOPE = "fairness"
#: Maximum length of a fairness id in characters. Longer ids are cut off, because clients choose
#: them and the queue stores them.
MAX_FAIRNESS_ID_LENGTH = 128


class SloHeaders(Check):
    """A check that reads the SLO headers of each request.

    A fairness id is ignored if the key lacks the scope, because a tenant could pretend to be many.
    """

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Set `context.ttft` and `context.fair`. Raises InvalidRequestError for an invalid time."""
        for name, value in scope["headers"]:
            if name == _TTFT_HEADER_BYTES:
                context.ttft_target = _parse_milliseconds(value.decode("latin-1"))
            elif name == _FAIRNESS_HEADER_BYTES and FAIRNESS_SCOPE in context.caller.scopes:
                context.fairness_id = value.decode("latin-1")[:MAX_FAIRNESS_ID_LENGTH]


def slo_header_checks(settings: GatewaySettings) -> list[Check]:
    """Return a list with the check, or an empty list if requests are not queued."""
    return [SloHeaders()] if settings.queues_requests else []


def _parse_milliseconds(text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise InvalidRequestError(
            f"The header {TTFT_HEADER} must be a number of milliseconds above 0, such as 500.", param=TTFT_HEADER
        )
    return milliseconds / 1000
