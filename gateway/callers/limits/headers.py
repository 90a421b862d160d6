"""What clients are told of their limits, in OpenAI's terms and in Anthropic's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

from llmops.gateway.callers.limits.buckets import MINUTE


class Level(NamedTuple):
    """What is left of a rate. `of` is "requests" or "tokens"."""

    of: str
    limit: int
    left: float


# as those of buckets.py
level_of: Callable[[tuple[str, int, float]], Level] = partial(tuple.__new__, Level)


def tightest(levels: Iterable[Level]) -> Iterable[Level]:
    """Of several limits on one thing, that of which the least is left."""
    found: dict[str, Level] = {}
    for level in levels:
        of, _, left = level
        known = found.get(of)
        if known is None or left < known[2]:
            found[of] = level
    return found.values()


def openai_headers(levels: Iterable[Level]) -> dict[str, str]:
    headers = {}
    for of, limit, left in tightest(levels):
        headers[f"x-ratelimit-limit-{of}"] = str(limit)
        headers[f"x-ratelimit-remaining-{of}"] = str(max(int(left), 0))
        headers[f"x-ratelimit-reset-{of}"] = duration(_until_full(limit, left))
    return headers


def anthropic_headers(levels: Iterable[Level], now: datetime) -> dict[str, str]:
    headers = {}
    for of, limit, left in tightest(levels):
        headers[f"anthropic-ratelimit-{of}-limit"] = str(limit)
        headers[f"anthropic-ratelimit-{of}-remaining"] = str(max(int(left), 0))
        full = now + timedelta(seconds=_until_full(limit, left))
        headers[f"anthropic-ratelimit-{of}-reset"] = full.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


def _until_full(limit: int, left: float) -> float:
    """Seconds."""
    return max(limit - left, 0.0) * MINUTE / limit


def duration(seconds: float) -> str:
    """As OpenAI writes it: `17ms`, `1.5s`, `6m0s`."""
    thousandths = round(seconds * 1000)
    if thousandths < 1000:
        return f"{thousandths}ms"
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
