"""The arithmetic of limits: pure functions of what is kept and of a clock that is handed in.

A rate is a token bucket: it holds `limit`, is full at first, and refills by `limit` a minute without steps. What an
answer used beyond its reservation puts it into debt. A hold is what open requests have at once (their number, or money
until their cost is known), beside what is spent for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MINUTE = 60.0
# Seconds after which a place may be free: nobody knows when an answer ends.
BUSY = 1.0
# Seconds: what no time on this scale brings back.
NEVER = 1e9
# Of a clock that goes back by more than this, what is kept is dated anew; less is two processes that ask at once.
STEP = 1.0
# A client that waits exactly as long as it was told must not fail by a bit of a float.
SLACK = 1e-6

RATE, PLACES, MONEY = "rate", "places", "money"


class Want(NamedTuple):
    """`amount` of what is kept under `key`; of MONEY also less will do, down to `least`."""

    kind: str
    key: str
    limit: int
    amount: int
    least: int = 0


class Change(NamedTuple):
    """What a reservation turned out to be.

    RATE: `used` more than was reserved (less: negative). PLACES and MONEY: `held` is given back, `used` is spent.
    """

    kind: str
    key: str
    limit: int
    held: int
    used: int


class Bucket(NamedTuple):
    """A rate as it was at `stamp` (seconds of any clock); `level` is negative in debt."""

    level: float
    stamp: float

    def at(self, now: float, limit: int) -> Bucket:
        """Refilled until `now`."""
        if now < self.stamp:
            return Bucket(min(self.level, limit), self.stamp if self.stamp - now <= STEP else now)
        level = self.level + (now - self.stamp) * limit / MINUTE
        return Bucket(level if level < limit else limit, now)

    def less(self, amount: int, limit: int) -> Bucket:
        level = self.level - amount
        return Bucket(level if level < limit else limit, self.stamp)


class Decision(NamedTuple):
    """All of the wants or none of them. `lacking` is the one that takes longest, None where all are given; `wait` the
    seconds until then, exact for a rate. `left`: what each has then, `given` how much of each was taken.
    """

    lacking: int | None
    wait: float
    left: tuple[float, ...]
    given: tuple[int, ...]


def decide(wants: Sequence[Want], left: Sequence[float]) -> Decision:
    """`left`: the level of each rate, the room of each hold."""
    waits = [wait_of(want, has) for want, has in zip(wants, left, strict=True)]
    longest = max(waits, default=0.0)
    if longest > 0:
        return Decision(waits.index(longest), longest, tuple(left), ())
    given = [given_of(want, has) for want, has in zip(wants, left, strict=True)]
    return Decision(None, 0.0, tuple([has - took for has, took in zip(left, given, strict=True)]), tuple(given))


def wait_of(want: Want, left: float) -> float:
    """Seconds until `want` can be given; 0 now. More than a bucket holds is given by a full one, as debt."""
    if want.kind == RATE:
        missing = (want.amount if want.amount < want.limit else want.limit) - left
        return missing * MINUTE / want.limit if missing > SLACK else 0.0
    if want.kind == PLACES:
        return BUSY if want.amount > left else 0.0
    return NEVER if want.least > left else 0.0


def given_of(want: Want, left: float) -> int:
    return min(want.amount, int(left)) if want.kind == MONEY else want.amount


def divided(wants: Iterable[Want], parts: int) -> list[Want]:
    """The share of one of `parts` that do not hear of each other. Money is not divided: it is counted elsewhere."""
    return [
        want if want.kind == MONEY or parts == 1 else want._replace(limit=max(want.limit // parts, 1)) for want in wants
    ]
