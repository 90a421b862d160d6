"""The interfaces of usage delivery and billing: the sink of events, and the prices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from llmops.gateway.interfaces import Usage, UsageEvent


class UsageSink(ABC):
    """An interface to the ledger.

    Calls may be repeated: after an error, and with events that the ledger already has.
    """

    @abstractmethod
    async def write(self, events: Sequence[UsageEvent]) -> None:
        """Write the events durably, each id once.

        Raises:
            LlmopsError: The sink is unavailable.
        """

    @abstractmethod
    async def confirmed(self, ids: Sequence[str]) -> frozenset[str]:
        """Return the ids among `ids` whose events the ledger has.

        Raises:
            LlmopsError: The ledger is unavailable.
        """

    async def next_number(self, gateway_id: str) -> int:
        """Return the number before which the ledger has all events of a gateway; 0 if unknown.

        Raises:
            LlmopsError: The ledger is unavailable.
        """
        return 0

    async def close(self) -> None:
        """Close the connections to the ledger."""
        return


#: Seconds between attempts to reach an unavailable sink: each failure moves on to the next value.
_RETRY_DELAYS = (0.2, 0.5, 1.0, 2.0, 5.0)


def retry_delay(failures: int) -> float:
    """Return the seconds to wait after `failures` + 1 consecutive failures."""
    return _RETRY_DELAYS[min(failures, len(_RETRY_DELAYS) - 1)]


class Prices(Protocol):
    """An interface to the prices of models."""

    def bill(self, model: str, usage: Usage, at: datetime) -> tuple[int, str | None]:
        """Return the cost in micro-dollars by the price in force at `at`, and the price's id.

        Return (0, None) if the model has no price.
        """
        ...


class NoPrices:
    """Prices that are unknown to the gateway. The ledger prices the events instead."""

    def bill(self, model: str, usage: Usage, at: datetime) -> tuple[int, str | None]:
        return 0, None
