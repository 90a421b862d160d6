"""The errors that a client gets for a request that exceeds a limit."""

from __future__ import annotations

from datetime import datetime

from llmops.gateway.errors import InsufficientQuotaError, RateLimitError, TokenRateLimitError
from llmops.gateway.interfaces import Quota
from llmops.gateway.ratelimit.budgets import LEDGER_INTERVAL
from llmops.gateway.ratelimit.headers import format_duration
from llmops.units import format_usd


def budget_exhausted(quota: Quota, now: datetime) -> RateLimitError:
    assert quota.budget is not None
    ends = quota.budget.ends(now)
    budget = f"{_quota_owner(quota)}, {format_usd(quota.budget.micros)} a {quota.budget.period},"
    return InsufficientQuotaError(
        f"The budget of {budget} has too little left for this request; the next period starts on {ends:%Y-%m-%d} (UTC)."
    )


def budget_part_exhausted(quota: Quota) -> RateLimitError:
    """Return the error of a gateway without Redis that has granted its part of a budget."""
    return RateLimitError(
        f"The server that shares the budget of {_quota_owner(quota)} among gateways is away, and what this gateway "
        f"may spend meanwhile is spent; try again in {LEDGER_INTERVAL:.0f} s.",
        retry_after=LEDGER_INTERVAL,
    )


def too_many_open_requests(quota: Quota, limit: float, wait: float) -> RateLimitError:
    many = f"{limit:.0f} {'request' if limit == 1 else 'requests'}"
    return RateLimitError(
        f"At most {many} of {_quota_owner(quota)} may be open at once; try again when one of them has ended.",
        retry_after=wait,
    )


def rate_exceeded(quota: Quota, of: str, limit: float, left: float, amount: int, wait: float) -> RateLimitError:
    """Return the error for an exceeded rate limit.

    Args:
        quota: The quota with the limit.
        of: The limited quantity, `requests` or `tokens`.
        limit: The limit per minute.
        left: The amount left.
        amount: The amount that the request needs.
        wait: Seconds until the amount is available.
    """
    kind = RateLimitError if of == "requests" else TokenRateLimitError
    needs = f"limit {limit:,.0f}, left {max(int(left), 0):,}, needed {amount:,}"
    return kind(
        f"Rate limit of {_quota_owner(quota)} reached on {of} per minute: {needs}. Try again in "
        f"{format_duration(wait)}.",
        retry_after=wait,
    )


def request_exceeds_limit(quota: Quota, prompt: int, most: int) -> TokenRateLimitError:
    """Return the error for a request larger than its limit, for which waiting does not help.

    Args:
        quota: The quota with the limit.
        prompt: Tokens of the prompt.
        most: The maximum tokens of all answers that the client set, 0 if the client set none.
    """
    asked = f"{prompt:,} in the prompt" + (f" and up to {most:,} in the answer" if most else "")
    shorter = "ask for a shorter answer" if most and quota.tpm is not None and prompt < quota.tpm else "shorten it"
    return TokenRateLimitError(
        f"The request has more tokens than {_quota_owner(quota)} may use in a minute ({quota.tpm:,}): {asked}; "
        f"{shorter}.",
        should_retry=False,
    )


def _quota_owner(quota: Quota) -> str:
    return f"{quota.of} for the model '{quota.model}'" if quota.model else quota.of
