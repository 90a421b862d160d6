"""What a walk through a grammar costs, and whether that grows with the answer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

#: Tokens of a walk. The cost of a grammar that keeps ever more readings of a text showed after 30 to 100.
WALK_TOKENS = 128
#: A token that takes this many times its limit ends a walk, and so does the third one over the limit.
TOO_SLOW, TOO_MANY = 5, 3
#: A cost grows when each quarter of a walk costs this many times the quarter before, …
_QUARTER = 1.25
#: … the last quarter this many times the first one, …
_WHOLE = 4.0
#: … and at least this much (CPU seconds): below, chance looks like growth.
_NOTABLE = 0.0025


@dataclass(frozen=True)
class WalkCosts:
    """CPU seconds: to join a batch, per token at most, and per token on average; `grows` with the answer."""

    join_seconds: float = 0.0
    token_seconds: float = 0.0
    mean_seconds: float = 0.0
    grows: bool = False


def summarize_walk(costs: list[float]) -> WalkCosts:
    """Return the costs of a walk whose steps took `costs` CPU seconds, the first one to join."""
    tokens = costs[1:]
    if not tokens:
        return WalkCosts(costs[0] if costs else 0.0)
    return WalkCosts(costs[0], max(tokens), sum(tokens) / len(tokens), _grows(tokens))


def is_too_slow(tokens: list[float], limit: float) -> bool:
    """Return True if a walk whose tokens took so long need not go on to be refused."""
    return bool(tokens) and (tokens[-1] > TOO_SLOW * limit or sum(one > limit for one in tokens) >= TOO_MANY)


def _grows(tokens: list[float]) -> bool:
    size = len(tokens) // 4
    if size < 8:
        return False
    quarters = [median(tokens[at * size : (at + 1) * size]) for at in range(4)]
    rises = all(later > _QUARTER * earlier for earlier, later in pairwise(quarters))
    return rises and quarters[3] > _NOTABLE and quarters[3] > _WHOLE * quarters[0]
