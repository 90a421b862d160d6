"""The arithmetic of limits: pure functions of a stored state and the time.

One record is kept for each quota: its two rates, and the money spent in this period. A rate is a
token bucket: the bucket's size is the limit per minute, the bucket starts full and refills
continuously, and usage beyond a reservation puts it into debt. Open requests hold slots (`places`),
and hold money until their cost is known: each process reports how much its requests hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmops.tuples import namedtuple_factory

MINUTE = 60.0
#: Seconds after which a client that found no free slot should retry. The value is a guess, because
#: the end of an answer cannot be predicted.
SLOT_RETRY_DELAY = 1.0
#: Seconds that mean "waiting does not help", for example for a budget that is used up.
NO_WAIT_HELPS = 1e9
#: Seconds by which a clock may go back before records get a new timestamp. Smaller steps occur when
#: two processes read their clocks at nearly the same time.
MAX_CLOCK_STEP = 1.0
#: Amount by which a bucket may fall short, so that rounding does not reject a client that waited
#: exactly as long as Retry-After said.
TOLERANCE = 1e-6
#: Limit that no usage reaches and that refills at once. It stands for an absent limit, which then
#: needs no code of its own.
UNLIMITED = 1e300


class Limit:
    """The limits of one quota on requests, tokens, slots and money.

    Money spent before the current period does not count.

    Attributes:
        name: The key of the quota's record.
        requests: Requests per minute.
        tokens: Tokens per minute.
        places: Requests that may be open at once.
        money: Micro-dollars per period.
        period: The first day of the current period, as a proleptic Gregorian ordinal.
        holds: True if open requests hold slots or money, which they give back.
    """

    def __init__(
        self,
        name: str,
        requests: float = UNLIMITED,
        tokens: float = UNLIMITED,
        places: float = UNLIMITED,
        money: float = UNLIMITED,
        period: int = 0,
    ) -> None:
        # Floats like the remaining amounts: Python takes twice as long to compare floats with
        # integers.
        self.requests, self.tokens, self.places, self.money = map(float, (requests, tokens, places, money))
        self.name, self.period = name, period
        self.holds = places < UNLIMITED or money < UNLIMITED

    def share(self, parts: int) -> Limit:
        """Return the part of this limit for one of `parts` gateways that do not communicate.

        A rate below one request per minute still grants one request, as debt, so that the parts
        together equal the limit. Money is not divided here: only the rest of a budget can be
        divided, and the caller knows the rest.
        """
        requests, tokens = (limit if limit == UNLIMITED else limit / parts for limit in (self.requests, self.tokens))
        places = self.places if self.places == UNLIMITED else max(self.places // parts, 1)
        return Limit(self.name, requests, tokens, places, self.money, self.period)


class LimitRequest(NamedTuple):
    """The amounts that one request asks of a quota.

    Attributes:
        requests: Requests.
        tokens: Tokens.
        places: Slots.
        money: Micro-dollars that the request can use at most.
        least: Micro-dollars below `money` that are enough to start the request.
    """

    requests: int = 0
    tokens: int = 0
    places: int = 0
    money: int = 0
    least: int = 0


class Settlement(NamedTuple):
    """The change that settles a reservation.

    Attributes:
        requests: Requests used beyond the reservation; negative if fewer were used.
        tokens: Tokens used beyond the reservation; negative if fewer were used.
        places: Slots held in addition; negative for slots given back.
        money: Micro-dollars held in addition; negative for money given back.
        spent: Micro-dollars spent.
    """

    requests: int = 0
    tokens: float = 0
    places: int = 0
    money: int = 0
    spent: int = 0


make_limit_request, make_settlement = namedtuple_factory(LimitRequest), namedtuple_factory(Settlement)

#: Settlements that are not written yet. The key is a limit's name; the value is the latest limit of
#: this name and the sum of its changes.
PendingSettlements = dict[str, tuple[Limit, Settlement]]


def add_settlement(sums: PendingSettlements, bound: Limit, change: Settlement) -> None:
    """Add `change` to the pending settlement of `bound`."""
    name = bound.name
    if name in sums:
        requests, tokens, places, money, spent = sums[name][1]
        more, counted, opened, held, paid = change
        change = make_settlement((requests + more, tokens + counted, places + opened, money + held, spent + paid))
    sums[name] = bound, change


#: Stored record of a limit: stamp, requests, tokens, spent, period. `stamp` is a time in seconds of
#: the limiter's clock, requests and tokens are the levels at that time (negative in debt), and
#: `spent` is in micro-dollars.
BucketState = tuple[float, float, float, float, float]
#: Amounts that a quota has left: requests, tokens, slots, and micro-dollars.
Remaining = tuple[float, float, float, float]


def advance_bucket(record: BucketState, bound: Limit, now: float) -> BucketState:
    """Return the record at the time `now`: refilled, and in the current period of `bound`."""
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
    """The outcome of a reservation: all requested amounts, or nothing.

    Attributes:
        left: The amounts that each limit has left afterwards.
        money: The micro-dollars taken from each limit.
        lacking: The index of the limit with the longest wait; None if the request is granted.
        of: The quantity that is lacking: requests, tokens, places or money; or "loss" if shared
            data was lost: ask again after `wait`.
        wait: Seconds until the amount is available; exact for a rate.
    """

    left: Sequence[Remaining]
    money: int
    lacking: int | None = None
    of: str = ""
    wait: float = 0.0


def decide(bounds: Sequence[Limit], asks: Sequence[LimitRequest], left: Sequence[Remaining]) -> Decision:
    """Decide whether a request fits into all of its limits.

    Args:
        bounds: The limits.
        asks: The amounts asked of each limit, in the order of `bounds`; `money` must be equal in
            all of them.
        left: The amounts that each limit has left, in the same order.
    """
    after = []
    for at, (requests, tokens, places, money) in enumerate(left):
        asked, counted, opened, held, _ = asks[at]
        if asked > requests or counted > tokens or opened > places or held > money:
            return _decide_short(bounds, asks, left)
        after.append((requests - asked, tokens - counted, places - opened, money - held))
    return make_decision((after, asks[0].money if asks else 0, None, "", 0.0))


make_decision = namedtuple_factory(Decision)


def _decide_short(bounds: Sequence[Limit], asks: Sequence[LimitRequest], left: Sequence[Remaining]) -> Decision:
    """Decide a request that cannot be granted in full.

    The request is granted if only money is short and each limit has at least the `least` money of
    the request left. The arguments are those of `decide`.
    """
    waits = [
        (wait, at, of)
        for at, each in enumerate(zip(bounds, asks, left, strict=True))
        for of, wait in zip(LimitRequest._fields, _waits(*each), strict=False)
    ]
    wait, lacking, of = max(waits, key=lambda entry: entry[0])
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
    """Return the seconds until each amount of `ask` is available, 0 for available amounts."""
    requests, tokens, places, money = left
    return (
        _seconds_until(ask.requests, requests, bound.requests),
        _seconds_until(ask.tokens, tokens, bound.tokens),
        SLOT_RETRY_DELAY if ask.places > max(places, 0) else 0.0,
        NO_WAIT_HELPS if ask.money and ask.least > money else 0.0,
    )


def _seconds_until(amount: int, level: float, limit: float) -> float:
    """Return the seconds until a bucket at `level` grants `amount`.

    The bucket holds `limit` and gets `limit` per minute. A full bucket grants an amount above
    `limit` as debt.
    """
    missing = min(amount, limit) - level
    return missing * MINUTE / limit if amount and missing > TOLERANCE else 0.0
