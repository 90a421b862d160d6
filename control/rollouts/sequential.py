"""Sequential tests by betting, which remain valid however often they are read.

A test of the null hypothesis "this event happens with a probability of at most p0" is a gambler who
bets against the hypothesis. Under the null hypothesis, the gambler's expected wealth never grows,
so the wealth ever reaches 1/alpha with a probability of at most alpha (Ville's inequality; Ramdas
et al., "Game-theoretic statistics and safe anytime-valid inference", 2023).

p0 may change from one event to the next, as long as it is chosen before the event.
"""

from __future__ import annotations

import math

#: Odds ratios that a test bets on, with the share of its wealth for each: for a common event that
#: becomes twice as frequent, and for a rare event that becomes frequent.
ODDS_RATIOS = ((2.0, 0.1), (5.0, 0.2), (20.0, 0.7))

#: Share of the wealth kept for a fault that begins later, and the part of this share that is bet
#: per event. Without this share, a thousand healthy requests would hide a later fault.
RESERVE, HAZARD = 0.05, 1 / 500

#: Certainty of the claim that an event is not more frequent. Promotions require the claim.
CONFIDENCE = 0.95


class BettingTest:
    """A test that an event is more frequent than it should be.

    Args:
        alpha: Probability of a false alarm, over the whole life of the test.
    """

    def __init__(self, alpha: float) -> None:
        self.is_worse = False
        self._limit = math.log(1 / alpha)
        self._bets = [math.log(share * (1 - RESERVE)) for _, share in ODDS_RATIOS]
        self._reserve = math.log(RESERVE)

    def observe(self, event: bool, p0: float) -> None:
        """Count whether the event happened. The probability of the event should be at most `p0`."""
        wealth = self._reserve
        for index, (ratio, share) in enumerate(ODDS_RATIOS):
            p1 = p0 * ratio / (p0 * ratio + 1 - p0)
            bet = _log_add(self._bets[index], self._reserve + math.log(HAZARD * share)) + _log_ratio(event, p1, p0)
            self._bets[index] = bet
            wealth = _log_add(wealth, bet)
        self._reserve += math.log(1 - HAZARD)
        self.is_worse = self.is_worse or wealth >= self._limit


class NoWorseTest:
    """A test that excludes that an event is more frequent than it should be by `margin` or more."""

    def __init__(self, margin: float) -> None:
        self.count = 0
        self._margin, self._evidence = margin, 0.0

    def observe(self, event: bool, p0: float) -> None:
        """Count whether the event happened. The probability of the event should be `p0`."""
        self.count += 1
        self._evidence += _log_ratio(event, p0, min(p0 + self._margin, (1 + p0) / 2))

    @property
    def is_ok(self) -> bool:
        """Return True if the test excludes an increase by `margin`."""
        return self._evidence >= -math.log(1 - CONFIDENCE)


def _log_ratio(event: bool, p1: float, p0: float) -> float:
    return math.log(p1 / p0) if event else math.log((1 - p1) / (1 - p0))


def _log_add(a: float, b: float) -> float:
    high, low = (a, b) if a > b else (b, a)
    return high + math.log1p(math.exp(low - high))
