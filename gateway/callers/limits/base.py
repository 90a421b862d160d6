"""Who keeps what callers used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from llmops.gateway.callers.limits.buckets import Change, Decision, Want

# Seconds for which a process that is not heard of keeps what it holds.
LEASE = 15.0


class Reserved(NamedTuple):
    """A decision, by the limiter that must hear how it ended, and the wants as they were decided there."""

    decision: Decision
    wants: Sequence[Want]
    by: Limiter


class Limiter(ABC):
    """Reserves in all or in none, for everybody who keeps the same things."""

    async def start(self) -> None:
        """Connect, where there is something to connect to; without it the first reservation does."""
        return

    @abstractmethod
    async def reserve(self, wants: Sequence[Want]) -> Reserved: ...

    @abstractmethod
    def settle(self, changes: Sequence[Change]) -> None:
        """At once, or soon: never waits and never raises."""

    @abstractmethod
    def spent(self, key: str, at_least: int) -> None:
        """What the ledger knows of a budget: restarts refill nothing."""

    def beat(self) -> None:
        """About once a second while something is held, or it is taken for lost (`LEASE`)."""
        return

    async def close(self) -> None:
        return
