"""The check that records how requests end, for the judge of a roll-out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmops.gateway.errors import CancelledStreamError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome

if TYPE_CHECKING:
    from llmops.gateway.routing.versions.version_directory import VersionDirectory

#: Minimum number of output tokens for a time per token, because the mean over fewer tokens says
#: little.
MIN_TPOT_TOKENS = 4
#: Number of an owner's first requests to a version whose outcomes always count for the version,
#: because a single conversation may have that many.
MIN_OWNER_REQUESTS = 30
#: Weight in percent above which a version's share of an owner's requests is not checked, because
#: the allowance of `is_random` then includes all requests.
MAX_CHECKED_WEIGHT = 40.0
#: Maximum number of owners whose requests are counted. With more owners, all counts begin again,
#: which bounds the memory.
MAX_OWNERS = 10_000


class OwnerSample:
    """The numbers of each owner's requests to each version, to find owners that choose a version.

    A client can try out names of conversations until a version with few requests answers. The
    requests of such a client are not a random sample, and tell about the owner instead of the
    version.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Counter[str]] = {}

    def is_random(self, model: str, owner: str, version: str, weight: float) -> bool:
        """Count a request. Return False if its owner seems to choose the version.

        Args:
            model: Name of the model.
            owner: The caller's owner of conversations.
            version: The version that answered.
            weight: Percentage of all requests that the version gets.
        """
        if len(self._counts) >= MAX_OWNERS:
            self._counts.clear()
        counts = self._counts.setdefault((model, owner), Counter())
        counts[version] += 1
        if counts[version] <= MIN_OWNER_REQUESTS or weight > MAX_CHECKED_WEIGHT:
            return True
        # twice the version's share, plus an allowance for a few long conversations
        return counts[version] <= (2 * weight / 100 + 0.2) * counts.total()


class OutcomeCheck(Check):
    """A check that records the outcomes of requests while a roll-out of their model is judged."""

    def __init__(self, directory: VersionDirectory) -> None:
        self._directory, self._sample = directory, OwnerSample()

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        model, version, table = context.model, context.version, self._directory.table
        if version and table.is_judged(model):
            values = _outcome_values(context, outcome)
            weight = table.weight(model, version)
            if values is not None and self._sample.is_random(model, context.caller.owner, version, weight):
                self._directory.record(model, values)


def _outcome_values(context: RequestContext, outcome: Outcome) -> Mapping[str, Any] | None:
    """Return the fields of control's RequestOutcome, or None if the outcome tells nothing.

    Clients that disconnect and invalid requests tell nothing about a version.
    """
    meter, usage, finish = context.meter, outcome.usage, outcome.finish or context.finish_reason
    status = outcome.status
    is_failure = finish in ("engine_lost", "error") or status >= 500
    if meter is None or (not is_failure and (400 <= status < 500 or finish == "cancelled")):
        return None
    if status == CancelledStreamError.status:
        return None
    features = context.describe_answer()
    tokens = usage.completion_tokens if usage else 0
    cached = usage.cached_tokens if usage else None
    has_tpot = tokens >= MIN_TPOT_TOKENS and meter.last > meter.first > 0
    return {
        "version": context.version,
        "ok": not is_failure,
        "ttft_s": meter.first - context.started if meter.first else None,
        "tpot_s": (meter.last - meter.first) / (tokens - 1) if has_tpot else None,
        "prompt_tokens": usage.prompt_tokens if usage else 0,
        "uncached_tokens": None if usage is None or cached is None else usage.prompt_tokens - cached,
        "output_tokens": tokens,
        "finish_reason": finish or None,
        "good": meter.outcome == "good" if meter.outcome is not None else None,
        **features,
        "refused": finish == "content_filter" or features.get("refused", False),
    }
