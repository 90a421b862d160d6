"""The costs of a walk through a grammar, and whether they grow with the length of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

#: Tokens of a walk. The cost of a grammar that keeps ever more readings of a text showed after 30
#: to 100.
WALK_TOKENS = 128
#: A token that takes this many times its limit ends a walk.
TOO_SLOW = 5
#: Tokens over the limit that end a walk.
TOO_MANY = 3
#: Costs grow if each quarter of a walk takes at least this many times the quarter before it.
_QUARTER_GROWTH = 1.25
#: Costs grow if the last quarter takes at least this many times the first one.
_TOTAL_GROWTH = 4.0
#: CPU seconds per token below which growth may be chance.
_NOTABLE = 0.0025


@dataclass(frozen=True)
class WalkCosts:
    """CPU seconds to join a batch, per token at most and on average.

    `grows` is True if tokens take ever longer.
    """

    join_seconds: float = 0.0
    token_seconds: float = 0.0
    mean_seconds: float = 0.0
    grows: bool = False


def summarize_walk(costs: list[float]) -> WalkCosts:
    """Return the costs of a walk whose steps took `costs` CPU seconds.

    The first step joins the batch.
    """
    tokens = costs[1:]
    if not tokens:
        return WalkCosts(costs[0] if costs else 0.0)
    return WalkCosts(
        join_seconds=costs[0],
        token_seconds=max(tokens),
        mean_seconds=sum(tokens) / len(tokens),
        grows=_grows(tokens),
    )


def is_too_slow(tokens: list[float], limit: float) -> bool:
    """Return True if the tokens so far took so long that the grammar will be rejected."""
    return bool(tokens) and (tokens[-1] > TOO_SLOW * limit or sum(seconds > limit for seconds in tokens) >= TOO_MANY)


def _grows(tokens: list[float]) -> bool:
    size = len(tokens) // 4
    if size < 8:
        return False
    quarters = [median(tokens[i * size : (i + 1) * size]) for i in range(4)]
    rises = all(later > _QUARTER_GROWTH * earlier for earlier, later in pairwise(quarters))
    return rises and quarters[3] > _NOTABLE and quarters[3] > _TOTAL_GROWTH * quarters[0]
