"""Detection of prompts that differ early and agree after the difference.

Such a difference, for example a timestamp at the top of the prompt, makes the whole prefix cache
useless.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

_BYTES_PER_TOKEN = 4
#: Number of tokens that must be equal after the difference of two prompts: enough that the equality
#: is not a coincidence.
SAMPLE_TOKENS = 32
#: Maximum number of tokens in the difference of two prompts. Dates and ids have fewer tokens.
MAX_CHANGED_TOKENS = 64
#: Minimum number of a tenant's prompts before the tenant is reported, so that a few prompts cause
#: no report.
MIN_PROMPTS = 20
#: Share of unstable prompts from which a tenant is reported.
REPORT_THRESHOLD = 0.5
#: Share of unstable prompts below which a tenant can be reported again. Lower than
#: REPORT_THRESHOLD, so that a share around it does not cause repeated reports.
RESET_THRESHOLD = 0.25
#: Weight of the newest prompt in the share of unstable prompts, which covers about the last 20.
UNSTABLE_SHARE_SMOOTHING = 0.05
#: Maximum number of remembered tenants, the most recently seen, and of bytes of each prompt that are
#: remembered and compared. Both bound the memory: without keys, addresses count as tenants.
MAX_TENANTS = 512
MAX_PROMPT_BYTES = 2**16


class PromptDivergence(NamedTuple):
    """The finding that many of a tenant's prompts differ early and agree after the difference.

    `share` is the share of such prompts. `token` is the position of the difference, counted from 0.
    """

    tenant: str
    token: int
    share: float


class _TenantPrompts:
    def __init__(self) -> None:
        self.last, self.count, self.share, self.is_reported = b"", 0, 0.0, False


class UnstablePromptDetector:
    """A detector that compares each prompt of a tenant with the tenant's previous prompt.

    A comparison costs only a few comparisons of memory.
    """

    def __init__(self, tenants: int = MAX_TENANTS) -> None:
        self._tenants = tenants
        self._seen: OrderedDict[str, _TenantPrompts] = OrderedDict()

    def record(self, tenant: str, ids: bytes) -> PromptDivergence | None:
        """Record a prompt (token ids, INT32).

        Return a divergence, once, when a tenant begins to send unstable prompts, otherwise None.
        """
        ids = ids[:MAX_PROMPT_BYTES]
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
            seen.is_reported = False
        if token is None or seen.is_reported or seen.count < MIN_PROMPTS or seen.share < REPORT_THRESHOLD:
            return None
        seen.is_reported = True
        return PromptDivergence(tenant, token, seen.share)


def divergence_point(one: bytes, other: bytes) -> int | None:
    """Return the first differing token of two prompts (INT32) that agree again soon, or None."""
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
    """Return the length of the common prefix in bytes."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
