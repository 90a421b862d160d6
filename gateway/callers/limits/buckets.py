"""The arithmetic of limits: pure functions of what is kept and of a clock that is handed in.

A rate is a token bucket: it holds `limit`, is full at first, and refills by `limit` a minute without steps. What an
answer used beyond its reservation puts it into debt. A hold is what open requests have at once (their number, or money
until their cost is known), beside what is spent for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import le, sub
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


def refilled(level: float, stamp: float, now: float, limit: int) -> tuple[float, float]:
    """The level of a rate that had `level` at `stamp` (seconds of any clock; negative in debt), and of when that is."""
    if now < stamp:
        return min(level, limit), stamp if stamp - now <= STEP else now
    level += (now - stamp) * limit / MINUTE
    return level if level < limit else limit, now


# What makes them of a tuple with all their values, for each request: the constructor of a NamedTuple is a function of
# Python's, which takes five times as long.
want_of: Callable[[tuple[str, str, int, int, int]], Want] = partial(tuple.__new__, Want)
change_of: Callable[[tuple[str, str, int, int, int]], Change] = partial(tuple.__new__, Change)


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
    given = [amount for _, _, _, amount, _ in wants]
    if not all(map(le, given, left)):
        waits = list(map(_wait_of, wants, left))
        longest = max(waits)
        if longest > 0:
            return Decision(waits.index(longest), longest, tuple(left), ())
        given = list(map(_given_of, wants, left))
    return Decision(None, 0.0, tuple(map(sub, left, given)), tuple(given))


def _wait_of(want: Want, left: float) -> float:
    """Seconds until `want` can be given; 0 now. More than a bucket holds is given by a full one, as debt."""
    if want.kind == RATE:
        missing = min(want.amount, want.limit) - left
        return missing * MINUTE / want.limit if missing > SLACK else 0.0
    if want.kind == PLACES:
        return BUSY if want.amount > left else 0.0
    return NEVER if want.least > left else 0.0


def _given_of(want: Want, left: float) -> int:
    return min(want.amount, int(left)) if want.kind == MONEY else want.amount


def divided(wants: Iterable[Want], parts: int) -> list[Want]:
    """The share of one of `parts` that do not hear of each other. Money is not divided: it is counted elsewhere."""
    return [
        want if want.kind == MONEY or parts == 1 else want._replace(limit=max(want.limit // parts, 1)) for want in wants
    ]
