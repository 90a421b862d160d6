"""Distributions of lengths as users write them.

Examples are `128`, `uniform:64,256`, `lognormal:256,0.6` and `choice:32@0.8,2048@0.2`.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from llmops.errors import InputError

FORMS = "N, uniform:LOW,HIGH, normal:MEAN,STDDEV, lognormal:MEDIAN,SIGMA, exponential:MEAN or choice:N@SHARE,N@SHARE"


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts. All drawn counts are at least 1."""

    text: str
    _draw: Callable[[random.Random], float]

    def draw(self, rng: random.Random) -> int:
        """Return a random length in tokens."""
        length = round(self._draw(rng))
        return length if length > 1 else 1


def parse_lengths(text: str) -> Lengths:
    """Return the distribution that `text` describes. Raise InputError with the accepted forms."""
    kind, _, rest = text.strip().partition(":")
    try:
        if not rest:
            return _fixed(text, int(kind))
        return Lengths(text, _KINDS[kind](rest))
    except (KeyError, ValueError) as error:
        raise InputError(f"Length {text!r} is invalid; write one of: {FORMS}.") from error


def _fixed(text: str, value: int) -> Lengths:
    if value < 1:
        raise InputError(f"Length {text!r} must be at least 1 token.")
    return Lengths(text, lambda _: value)


def _numbers(rest: str, count: int) -> list[float]:
    values = [float(part) for part in rest.split(",")]
    if len(values) != count or any(v < 0 or not math.isfinite(v) for v in values):
        raise ValueError(rest)
    return values


def _uniform(rest: str) -> Callable[[random.Random], float]:
    low, high = _numbers(rest, 2)
    if high < low:
        raise ValueError(rest)
    return lambda rng: rng.randint(int(low), int(high))


def _normal(rest: str) -> Callable[[random.Random], float]:
    mean, deviation = _numbers(rest, 2)
    return lambda rng: rng.gauss(mean, deviation)


def _lognormal(rest: str) -> Callable[[random.Random], float]:
    median, sigma = _numbers(rest, 2)
    if median <= 0:
        raise ValueError(rest)
    mean = math.log(median)
    return lambda rng: rng.lognormvariate(mean, sigma)


def _exponential(rest: str) -> Callable[[random.Random], float]:
    (mean,) = _numbers(rest, 1)
    if mean <= 0:
        raise ValueError(rest)
    return lambda rng: rng.expovariate(1 / mean)


def _choice(rest: str) -> Callable[[random.Random], float]:
    pairs = [part.partition("@") for part in rest.split(",")]
    values = [float(value) for value, _, _ in pairs]
    weights = [float(share) if share else 1.0 for _, _, share in pairs]
    if min(values) < 1 or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(rest)
    return lambda rng: rng.choices(values, weights)[0]


_KINDS: dict[str, Callable[[str], Callable[[random.Random], float]]] = {
    "uniform": _uniform,
    "normal": _normal,
    "lognormal": _lognormal,
    "exponential": _exponential,
    "choice": _choice,
}
