"""The interface of the backends that store the state of limits: memory and Redis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from llmops.gateway.ratelimit.buckets import Decision, Limit, LimitRequest, Settlement
from llmops.tuples import namedtuple_factory

#: Seconds without a call of `beat` after which a process is taken for dead and loses the slots and
#: money that it holds.
LEASE_TIMEOUT = 15.0


class ReserveResult(NamedTuple):
    """The result of a reservation.

    Attributes:
        decision: The decision, with the amounts that are left.
        bounds: The limits that the decision was made with; a fallback limiter uses smaller limits.
        by: The limiter that decided. The reservation must be settled at this limiter.
    """

    decision: Decision
    bounds: Sequence[Limit]
    by: Limiter


make_reserve_result = namedtuple_factory(ReserveResult)


class Limiter(ABC):
    """An interface to a store of limits, which grants a reservation in all its limits or in none.

    All gateways that use the same store share the limits.
    """

    #: A number that changes when the record of spending may be lost. Budgets then query the ledger
    #: again.
    generation = 0
    #: Number of processes that share the limits, including this process.
    gateways = 1

    async def start(self) -> None:
        """Connect to the backend's server, if the backend has one.

        Without this call, the first reservation connects.
        """
        return

    @abstractmethod
    async def reserve(self, bounds: Sequence[Limit], asks: Sequence[LimitRequest]) -> ReserveResult:
        """Reserve the amounts `asks`, one for each limit of `bounds`, or nothing.

        No two limits of `bounds` may have the same name.
        """

    @abstractmethod
    def settle(self, bounds: Sequence[Limit], change: Settlement) -> None:
        """Apply `change` to each of `bounds`, at once or soon. Never waits and never raises."""

    @abstractmethod
    def spent(self, bound: Limit, at_least: int) -> None:
        """Raise the known spending in the limit's period to at least `at_least` micro-dollars.

        The ledger reports this spending, so that a restart does not refill the budget.
        """

    def beat(self) -> None:
        """Renew the lease on the slots and money that this process holds.

        Called every `GROWTH_INTERVAL` seconds while requests are open. After `LEASE_TIMEOUT`
        seconds without a call, the process is taken for dead and loses them.
        """
        return

    async def close(self) -> None:
        return
