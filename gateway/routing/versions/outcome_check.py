"""The check that records how requests end, for the judge of a roll-out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmops.gateway.errors import CancelledStreamError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome

if TYPE_CHECKING:
    from llmops.gateway.routing.versions.version_directory import VersionDirectory

#: Output tokens from which the time per token is meaningful.
MIN_TPOT_TOKENS = 4


class OutcomeCheck(Check):
    """Records the outcomes of requests while a roll-out of their model compares versions."""

    def __init__(self, directory: VersionDirectory) -> None:
        self._directory = directory

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        if context.version and self._directory.table.is_judged(context.model):
            values = _outcome_values(context, outcome)
            if values is not None:
                self._directory.record(context.model, values)


def _outcome_values(context: RequestContext, outcome: Outcome) -> Mapping[str, Any] | None:
    """Return the fields of control's RequestOutcome, or None for a request that failed by itself.

    Clients that leave and invalid requests say nothing about a version.
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
        "end_to_end_s": meter.last - context.started if meter.last else 0.0,
        "prompt_tokens": usage.prompt_tokens if usage else 0,
        "uncached_tokens": None if usage is None or cached is None else usage.prompt_tokens - cached,
        "output_tokens": tokens,
        "finish_reason": finish or None,
        "good": meter.outcome == "good" if meter.outcome is not None else None,
        **features,
        "refused": finish == "content_filter" or features.get("refused", False),
    }
