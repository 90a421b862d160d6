"""The arithmetic of limits: pure functions of what is kept and of a clock that is handed in.

Of each quota one record is kept: its two rates, and what was spent of its money in this period. A
rate is a token bucket: it holds its limit, is full at first, and refills by as much a minute
without steps; what an answer used beyond its reservation puts it into debt. Places, and money until
its cost is known, are held by open requests: how much, each process says for its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmops.tuples import namedtuple_factory

MINUTE = 60.0
# Seconds after which a place may be free: nobody knows when an answer ends.
SLOT_RETRY_DELAY = 1.0
# Seconds: what no time on this scale brings back.
NO_WAIT_HELPS = 1e9
# Of a clock that goes back by more than this, what is kept is dated anew; less is two processes
# that ask at once.
MAX_CLOCK_STEP = 1.0
# A client that waits exactly as long as it was told must not fail by a bit of a float.
TOLERANCE = 1e-6
# A limit that nothing comes near, and which is full again at once: what is not limited needs no
# case of its own.
UNLIMITED = 1e300


class Limit:
    """What a quota allows of each thing.

    Its record is kept under `name`; what was spent before `period` (the number of a day) does not
    count in it.
    """

    __slots__ = ("holds", "money", "name", "period", "places", "requests", "tokens")

    def __init__(
        self,
        name: str,
        requests: float = UNLIMITED,
        tokens: float = UNLIMITED,
        places: float = UNLIMITED,
        money: float = UNLIMITED,
        period: int = 0,
    ) -> None:
        # floats, as what is left: Python takes twice as long to compare them with whole numbers
        self.requests, self.tokens, self.places, self.money = map(float, (requests, tokens, places, money))
        self.name, self.period = name, period
        self.holds = places < UNLIMITED or money < UNLIMITED

    def share(self, parts: int) -> Limit:
        """Return the share of one of `parts` gateways that do not hear of each other.

        A share of less than one request is a bucket that gives one as debt, so that all shares
        together are the limit. Money is not divided: only its rest may be, which the caller knows.
        """
        requests, tokens = (limit if limit == UNLIMITED else limit / parts for limit in (self.requests, self.tokens))
        places = self.places if self.places == UNLIMITED else max(self.places // parts, 1)
        return Limit(self.name, requests, tokens, places, self.money, self.period)


class LimitRequest(NamedTuple):
    """What one request asks of a quota; of `money` also less will do, down to `least`."""

    requests: int = 0
    tokens: int = 0
    places: int = 0
    money: int = 0
    least: int = 0


class Settlement(NamedTuple):
    """What a reservation turned out to be: so much more is used (`requests`, `tokens`) and held
    (`places`, `money`), where it is less negative; and so much is `spent`.
    """

    requests: int = 0
    tokens: int = 0
    places: int = 0
    money: int = 0
    spent: int = 0


make_limit_request, make_settlement = namedtuple_factory(LimitRequest), namedtuple_factory(Settlement)

# what was settled and not yet written: by name the last bound, and the sum of its changes
PendingSettlements = dict[str, tuple[Limit, Settlement]]


def add_settlement(sums: PendingSettlements, bound: Limit, change: Settlement) -> None:
    name = bound.name
    if name in sums:
        requests, tokens, places, money, spent = sums[name][1]
        more, counted, opened, held, paid = change
        change = make_settlement((requests + more, tokens + counted, places + opened, money + held, spent + paid))
    sums[name] = bound, change


# requests and tokens at `stamp` (seconds of any clock; negative in debt), and what was spent in
# `period`
BucketState = tuple[float, float, float, float, float]
# requests, tokens, places and money that a quota has left
Remaining = tuple[float, float, float, float]


def advance_bucket(record: BucketState, bound: Limit, now: float) -> BucketState:
    """What has become of it by now, and of when that is."""
    stamp, requests, tokens, spent, period = record
    if now >= stamp:
        minutes = (now - stamp) / MINUTE
        requests += minutes * bound.requests
        tokens += minutes * bound.tokens
        stamp = now
    elif now < stamp - MAX_CLOCK_STEP:
        stamp = now
    if requests > bound.requests:
        requests = bound.requests
    if tokens > bound.tokens:
        tokens = bound.tokens
    if period < bound.period:
        spent, period = 0.0, bound.period
    return stamp, requests, tokens, spent, period


class Decision(NamedTuple):
    """All that was asked, or nothing.

    `left`: what each bound has then; `money`: how much of each was taken.

    `lacking` is the bound that takes longest, for want of `of` (requests, tokens, places or money),
    None where all is given; `wait` the seconds until then, exact for a rate.
    """

    left: Sequence[Remaining]
    money: int
    lacking: int | None = None
    of: str = ""
    wait: float = 0.0


def decide(bounds: Sequence[Limit], asks: Sequence[LimitRequest], left: Sequence[Remaining]) -> Decision:
    """`asks`: of each bound; all ask for the same money."""
    after = []
    for at, (requests, tokens, places, money) in enumerate(left):
        asked, counted, opened, held, _ = asks[at]
        if asked > requests or counted > tokens or opened > places or held > money:
            return _decide_short(bounds, asks, left)
        after.append((requests - asked, tokens - counted, places - opened, money - held))
    return make_decision((after, asks[0].money if asks else 0, None, "", 0.0))


make_decision = namedtuple_factory(Decision)


def _decide_short(bounds: Sequence[Limit], asks: Sequence[LimitRequest], left: Sequence[Remaining]) -> Decision:
    """The same where something is not there in full."""
    waits = [
        (wait, at, of)
        for at, each in enumerate(zip(bounds, asks, left, strict=True))
        for of, wait in zip(LimitRequest._fields, _waits(*each), strict=False)
    ]
    wait, lacking, of = max(waits, key=lambda one: one[0])
    if wait > 0:
        return Decision(left, 0, lacking, of, wait)
    money = asks[0].money
    if money:
        money = min(money, *(int(room) for _, _, _, room in left))
    after = [
        (r - ask.requests, t - ask.tokens, p - ask.places, m - money)
        for ask, (r, t, p, m) in zip(asks, left, strict=True)
    ]
    return Decision(after, money)


def _waits(bound: Limit, ask: LimitRequest, left: Remaining) -> tuple[float, float, float, float]:
    """Seconds until each can be given; 0 now, and for what is not asked."""
    requests, tokens, places, money = left
    return (
        _seconds_until(ask.requests, requests, bound.requests),
        _seconds_until(ask.tokens, tokens, bound.tokens),
        SLOT_RETRY_DELAY if ask.places > max(places, 0) else 0.0,
        NO_WAIT_HELPS if ask.money and ask.least > money else 0.0,
    )


def _seconds_until(amount: int, level: float, limit: float) -> float:
    """More than a bucket holds is given by a full one, as debt."""
    missing = min(amount, limit) - level
    return missing * MINUTE / limit if amount and missing > TOLERANCE else 0.0
