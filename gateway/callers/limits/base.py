"""Who keeps what callers used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from llmops.gateway.callers.limits.buckets import Ask, Bound, Change, Decision
from llmops.tuples import maker

# Seconds for which a process that is not heard of keeps what it holds.
LEASE = 15.0


class Reserved(NamedTuple):
    """A decision, by the limiter that must hear how it ended, and the bounds as they were there."""

    decision: Decision
    bounds: Sequence[Bound]
    by: Limiter


reserved_of = maker(Reserved)


class Limiter(ABC):
    """Reserves in all or in none, for everybody who keeps the same things."""

    #: Changes when what was spent may have been lost: budgets ask the ledger again.
    generation = 0

    async def start(self) -> None:
        """Connect, where there is something to connect to; without it the first reservation does."""
        return

    @abstractmethod
    async def reserve(self, bounds: Sequence[Bound], asks: Sequence[Ask]) -> Reserved:
        """An ask of each bound. No two bounds have one name."""

    @abstractmethod
    def settle(self, bounds: Sequence[Bound], change: Change) -> None:
        """Of each of them. At once, or soon: never waits and never raises."""

    @abstractmethod
    def spent(self, bound: Bound, at_least: int) -> None:
        """What the ledger knows of its period: restarts refill nothing."""

    def beat(self) -> None:
        """About once a second while something is held, or it is taken for lost (`LEASE`)."""
        return

    async def close(self) -> None:
        return
