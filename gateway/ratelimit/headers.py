"""Response headers that describe a client's limits, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import inf

from llmops.gateway.ratelimit.buckets import MINUTE, UNLIMITED, Limit, Remaining

Headers = list[tuple[bytes, bytes]]
#: A limit and its state: the quantity ("requests" or "tokens"), the limit, and the amount left.
Level = tuple[str, float, float]


def tightest_levels(bounds: Sequence[Limit], left: Sequence[Remaining]) -> list[Level]:
    """Return the tightest limit on requests and the tightest limit on tokens.

    The tightest limit has the smallest amount left.
    """
    requests = tokens = UNLIMITED
    few = little = inf
    for at, bound in enumerate(bounds):
        some, more, _, _ = left[at]
        if some < few or (some == few and bound.requests < requests):
            few, requests = some, bound.requests
        if more < little or (more == little and bound.tokens < tokens):
            little, tokens = more, bound.tokens
    levels = []
    if requests < UNLIMITED:
        levels.append(("requests", requests, few))
    if tokens < UNLIMITED:
        levels.append(("tokens", tokens, little))
    return levels


def openai_headers(levels: Iterable[Level]) -> Headers:
    headers: Headers = []
    for of, limit, left in levels:
        limit_header, remaining, reset = _openai_header_names(of, limit)
        rest = b"%d" % int(left) if left > 0 else b"0"
        headers += limit_header, (remaining, rest), (reset, format_duration(_seconds_until_full(limit, left)).encode())
    return headers


@lru_cache(maxsize=1024)
def _openai_header_names(of: str, limit: float) -> tuple[tuple[bytes, bytes], bytes, bytes]:
    """Return the name and value of the limit header, and the names of two further headers.

    The further headers have the amount that remains and the time of the reset. `of` is the limited
    quantity, `requests` or `tokens`.
    """
    limit_of, remaining, reset = (f"x-ratelimit-{what}-{of}".encode() for what in ("limit", "remaining", "reset"))
    return (limit_of, b"%d" % limit), remaining, reset


def _seconds_until_full(limit: float, left: float) -> float:
    """Return the seconds until a bucket with `left` of `limit` is full."""
    return (limit - left) * MINUTE / limit if left < limit else 0.0


def format_duration(seconds: float) -> str:
    """Format seconds like OpenAI: `17ms`, `1.5s`, `6m0s`."""
    thousandths = round(seconds * 1000)
    if thousandths < 1000:
        return f"{thousandths}ms"
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
