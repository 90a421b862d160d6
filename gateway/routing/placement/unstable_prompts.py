"""Prompts whose beginning changes although they go on alike: a timestamp at the top costs all of a prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

_BYTES_PER_TOKEN = 4
# Tokens that must come again after what changed, and how many may have changed.
SAMPLE_TOKENS, MAX_CHANGED_TOKENS = 32, 64
# Prompts of a tenant before anything is said of it; the share of unstable ones from which it is, and below which it is
# again worth a word the next time.
MIN_PROMPTS, REPORT_THRESHOLD, RESET_THRESHOLD = 20, 0.5, 0.25
# Weight of the newest prompt in the share.
UNSTABLE_SHARE_SMOOTHING = 0.05
MAX_TENANTS = 10_000


class PromptDivergence(NamedTuple):
    """A tenant's prompts part at this token (from 0) and go on alike after it; `share` of its prompts do."""

    tenant: str
    token: int
    share: float


class _TenantPrompts:
    __slots__ = ("count", "last", "share", "told")

    def __init__(self) -> None:
        self.last, self.count, self.share, self.told = b"", 0, 0.0, False


class UnstablePromptDetector:
    """Compares each prompt of a tenant with its last one, at the cost of a few comparisons of memory."""

    def __init__(self, tenants: int = MAX_TENANTS) -> None:
        self._tenants = tenants
        self._seen: OrderedDict[str, _TenantPrompts] = OrderedDict()

    def look(self, tenant: str, ids: bytes) -> PromptDivergence | None:
        """What to tell of a tenant, once when it begins; None for all that is as it should be."""
        seen = self._seen.get(tenant)
        if seen is None:
            seen = self._seen[tenant] = _TenantPrompts()
            if len(self._seen) > self._tenants:
                self._seen.popitem(last=False)
        self._seen.move_to_end(tenant)
        token = divergence_point(seen.last, ids)
        seen.last, seen.count = ids, seen.count + 1
        seen.share += UNSTABLE_SHARE_SMOOTHING * ((token is not None) - seen.share)
        if seen.share < RESET_THRESHOLD:
            seen.told = False
        if token is None or seen.told or seen.count < MIN_PROMPTS or seen.share < REPORT_THRESHOLD:
            return None
        seen.told = True
        return PromptDivergence(tenant, token, seen.share)

    def shares(self) -> dict[str, float]:
        """Of each tenant that sent enough prompts: the share of those that part early and go on alike."""
        return {name: seen.share for name, seen in self._seen.items() if seen.count >= MIN_PROMPTS}


def divergence_point(one: bytes, other: bytes) -> int | None:
    """The token at which two prompts (INT32) part, if they go on alike soon after it; else None."""
    token = _common_prefix_bytes(one, other) // _BYTES_PER_TOKEN
    at = token * _BYTES_PER_TOKEN
    if at >= len(one) or at >= len(other):
        return None
    for skipped in (SAMPLE_TOKENS // 2, MAX_CHANGED_TOKENS):
        start = at + skipped * _BYTES_PER_TOKEN
        sample = one[start : start + SAMPLE_TOKENS * _BYTES_PER_TOKEN]
        if len(sample) < SAMPLE_TOKENS * _BYTES_PER_TOKEN:
            return None
        found = other.find(sample, at, start + (SAMPLE_TOKENS + MAX_CHANGED_TOKENS) * _BYTES_PER_TOKEN)
        while found >= 0 and (found - at) % _BYTES_PER_TOKEN:
            found = other.find(sample, found + 1, start + (SAMPLE_TOKENS + MAX_CHANGED_TOKENS) * _BYTES_PER_TOKEN)
        if found >= 0:
            return token
    return None


def _common_prefix_bytes(one: bytes, other: bytes) -> int:
    """Bytes that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
