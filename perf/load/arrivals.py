"""Open-loop arrival processes: when each session starts, in seconds from the start of the run."""

from __future__ import annotations

import random
from collections.abc import Iterator

from llmops.errors import InputError

KINDS = ("constant", "poisson", "bursty")
#: Gamma shape of bursty arrivals; 1 is Poisson. The squared coefficient of variation is 1/BURSTY.
BURSTY = 0.25


def arrival_times(kind: str, rate: float, rng: random.Random) -> Iterator[float]:
    """Endless arrival offsets with `rate` per second on average.

    `bursty` draws gaps from a gamma distribution with shape `BURSTY`, as vLLM's and TensorRT-LLM's serving benchmarks
    do with --burstiness.
    """
    if rate <= 0:
        raise InputError(f"The rate must be above 0 requests/s, not {rate}.")
    if kind == "constant":
        return _constant(rate)
    shape = {"poisson": 1.0, "bursty": BURSTY}.get(kind)
    if shape is None:
        raise InputError(f"Arrival process {kind!r} is unknown; it is one of {', '.join(KINDS)}.")
    return _gamma(rate, shape, rng)


def _constant(rate: float) -> Iterator[float]:
    count = 0
    while True:
        yield count / rate
        count += 1


def _gamma(rate: float, shape: float, rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.gammavariate(shape, 1 / (rate * shape))
        yield now
