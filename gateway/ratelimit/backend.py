"""The interface of the backends that keep the state of limits: memory and Redis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from llmops.gateway.ratelimit.buckets import Decision, Limit, LimitRequest, Settlement
from llmops.tuples import namedtuple_factory

#: Seconds after which a process without a sign of life loses the slots and money that it holds.
LEASE_TIMEOUT = 15.0


class ReserveResult(NamedTuple):
    """The result of a reservation.

    Attributes:
        decision: The decision.
        bounds: The limits as the deciding limiter had them.
        by: The limiter that decided. The reservation must be settled there.
    """

    decision: Decision
    bounds: Sequence[Limit]
    by: Limiter


make_reserve_result = namedtuple_factory(ReserveResult)


class Limiter(ABC):
    """A store of limits that grants a reservation in all of its limits or in none.

    All gateways that use the same store share the limits.
    """

    #: Changes when the record of spending may be lost. Budgets then ask the ledger again.
    generation = 0

    async def start(self) -> None:
        """Connect to the backend, if it has a server.

        Without this call, the first reservation connects.
        """
        return

    @abstractmethod
    async def reserve(self, bounds: Sequence[Limit], asks: Sequence[LimitRequest]) -> ReserveResult:
        """Reserve `asks`, one for each of `bounds`, or nothing.

        No two bounds may have the same name.
        """

    @abstractmethod
    def settle(self, bounds: Sequence[Limit], change: Settlement) -> None:
        """Apply `change` to each of `bounds`, at once or soon. Never waits and never raises."""

    @abstractmethod
    def spent(self, bound: Limit, at_least: int) -> None:
        """Record that the ledger knows `at_least` micro-dollars to be spent in the bound's period.

        A restart then does not refill the budget.
        """

    def beat(self) -> None:
        """Renew the lease on what this process holds.

        Called about once a second while something is held. After `LEASE_TIMEOUT` without a call it
        is taken for lost.
        """
        return

    async def close(self) -> None:
        return
