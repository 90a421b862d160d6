"""What a caller is told who may not."""

from __future__ import annotations

from datetime import datetime

from llmops.gateway.callers.limits.buckets import Want
from llmops.gateway.callers.limits.headers import duration
from llmops.gateway.errors import InsufficientQuotaError, RateLimitError, TokenRateLimitError
from llmops.gateway.messages import Quota


def refusal(quota: Quota, of: str, want: Want, left: float, wait: float, now: datetime) -> RateLimitError:
    """`of`: what lacks (requests, tokens, places or money); `wait`: seconds until it may be there."""
    whose = _whose(quota)
    if of == "money":
        assert quota.budget is not None
        ends = quota.budget.ends(now)
        spent = f"The budget of {whose}, ${quota.budget.micros / 1e6:,.2f} a {quota.budget.period}, is used up"
        return InsufficientQuotaError(f"{spent}; it begins anew on {ends:%Y-%m-%d} (UTC).")
    if of == "places":
        many = f"{want.limit} {'request' if want.limit == 1 else 'requests'}"
        return RateLimitError(f"At most {many} of {whose} may be open at once; wait for one to end.", retry_after=wait)
    kind = RateLimitError if of == "requests" else TokenRateLimitError
    needs = f"limit {want.limit:,}, left {max(int(left), 0):,}, needed {want.amount:,}"
    return kind(
        f"Rate limit of {whose} reached on {of} per minute: {needs}. Try again in {duration(wait)}.", retry_after=wait
    )


def too_large(quota: Quota, prompt: int, most: int) -> TokenRateLimitError:
    """What no wait would let through."""
    asked = f"{prompt:,} in the prompt" + (f" and up to {most:,} in the answer" if most else "")
    shorter = "ask for a shorter answer" if most and quota.tpm is not None and prompt < quota.tpm else "shorten it"
    return TokenRateLimitError(
        f"The request has more tokens than {_whose(quota)} may use in a minute ({quota.tpm:,}): {asked}; {shorter}.",
        should_retry=False,
    )


def _whose(quota: Quota) -> str:
    return f"{quota.of} for the model '{quota.model}'" if quota.model else quota.of
