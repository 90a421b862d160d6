"""Interfaces of usage: the sink of events, and the prices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from llmops.gateway.interfaces import Usage, UsageEvent


class UsageSink(ABC):
    """An interface to the ledger.

    Calls may be repeated: after an error, and with events that it has already.
    """

    @abstractmethod
    async def write(self, events: Sequence[UsageEvent]) -> None:
        """Write the events durably, each id once.

        Raises:
            LlmopsError: The sink is away.
        """

    @abstractmethod
    async def confirmed(self, ids: Sequence[str]) -> frozenset[str]:
        """Return those of the event ids that the ledger has.

        Raises:
            LlmopsError: The ledger is away.
        """

    async def close(self) -> None:
        """Close connections."""
        return


#: Seconds between two attempts to reach a sink that is away.
_RETRY_DELAYS = (0.2, 0.5, 1.0, 2.0, 5.0)


def retry_delay(failures: int) -> float:
    """Return the seconds to wait after `failures` + 1 failed attempts."""
    return _RETRY_DELAYS[min(failures, len(_RETRY_DELAYS) - 1)]


class Prices(Protocol):
    """An interface to the cost of tokens."""

    def bill(self, model: str, usage: Usage, at: datetime) -> tuple[int, str | None]:
        """Return the cost in micro-dollars by the price in force at `at`, and the price's id.

        Return (0, None) if the model has no price.
        """
        ...


class NoPrices:
    """A source without prices: the ledger, which knows all prices, prices the events."""

    def bill(self, model: str, usage: Usage, at: datetime) -> tuple[int, str | None]:
        return 0, None
