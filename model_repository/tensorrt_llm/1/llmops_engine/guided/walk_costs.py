"""Costs of a walk through a grammar, and the test for costs that grow with the answer's length."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

#: Number of tokens of a walk. The growing cost of ambiguous grammars, whose parser keeps ever more
#: readings of a text, showed after 30 to 100 tokens.
WALK_TOKENS = 128
#: Multiple of the limit per token at which a single token ends a walk. Chance does not delay a token
#: that much.
TOO_SLOW = 5
#: Number of tokens over the limit that ends a walk. Fewer such tokens may be chance.
TOO_MANY = 3
#: Costs count as growing only if each quarter of a walk takes more than this multiple of the
#: quarter before it.
_QUARTER_GROWTH = 1.25
#: Costs count as growing only if the last quarter of a walk takes more than this multiple of the
#: first quarter.
_TOTAL_GROWTH = 4.0
#: CPU seconds per token up to which growth is ignored, because it may be chance.
_NOTABLE = 0.0025


@dataclass(frozen=True)
class WalkCosts:
    """The CPU time that a grammar takes while an answer follows it.

    `join_seconds` is the time to join a batch, `token_seconds` the maximum and `mean_seconds` the
    mean time per token. `grows` is True if each token takes longer than the tokens before it.
    """

    join_seconds: float = 0.0
    token_seconds: float = 0.0
    mean_seconds: float = 0.0
    grows: bool = False


def summarize_walk(costs: list[float]) -> WalkCosts:
    """Return the costs of a walk whose steps took `costs` CPU seconds.

    The first cost is the time to join the batch; each further cost is the time of one token.
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
    """Return True if the tokens so far took so long that the grammar will be rejected.

    `tokens` are the seconds of each token, and `limit` is the maximum for a token.
    """
    return bool(tokens) and (tokens[-1] > TOO_SLOW * limit or sum(seconds > limit for seconds in tokens) >= TOO_MANY)


def _grows(tokens: list[float]) -> bool:
    size = len(tokens) // 4
    if size < 8:
        return False
    quarters = [median(tokens[i * size : (i + 1) * size]) for i in range(4)]
    rises = all(later > _QUARTER_GROWTH * earlier for earlier, later in pairwise(quarters))
    return rises and quarters[3] > _NOTABLE and quarters[3] > _TOTAL_GROWTH * quarters[0]
