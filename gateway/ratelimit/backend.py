"""Who keeps what callers used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from llmops.gateway.ratelimit.buckets import Decision, Limit, LimitRequest, Settlement
from llmops.tuples import namedtuple_factory

# Seconds for which a process that is not heard of keeps what it holds.
LEASE_TIMEOUT = 15.0


class ReserveResult(NamedTuple):
    """A decision, by the limiter that must hear how it ended, and the bounds as they were there."""

    decision: Decision
    bounds: Sequence[Limit]
    by: Limiter


make_reserve_result = namedtuple_factory(ReserveResult)


class Limiter(ABC):
    """Reserves in all or in none, for everybody who keeps the same things."""

    #: Changes when what was spent may have been lost: budgets ask the ledger again.
    generation = 0

    async def start(self) -> None:
        """Connect, where there is something to connect to; without it the first reservation does."""
        return

    @abstractmethod
    async def reserve(self, bounds: Sequence[Limit], asks: Sequence[LimitRequest]) -> ReserveResult:
        """An ask of each bound. No two bounds have one name."""

    @abstractmethod
    def settle(self, bounds: Sequence[Limit], change: Settlement) -> None:
        """Of each of them. At once, or soon: never waits and never raises."""

    @abstractmethod
    def spent(self, bound: Limit, at_least: int) -> None:
        """What the ledger knows of its period: restarts refill nothing."""

    def beat(self) -> None:
        """About once a second while something is held, or it is taken for lost (`LEASE_TIMEOUT`)."""
        return

    async def close(self) -> None:
        return
