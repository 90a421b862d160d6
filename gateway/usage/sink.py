"""Where usage goes, and what it costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from llmops.gateway.interfaces import Usage, UsageEvent


class UsageSink(ABC):
    """Takes events away. All of it may be called again after it has raised, and with what it has had before."""

    @abstractmethod
    async def write(self, events: Sequence[UsageEvent]) -> None:
        """Durable when it returns; once per id, however often it comes. Raises LlmopsError when it cannot now."""

    @abstractmethod
    async def confirmed(self, ids: Sequence[str]) -> frozenset[str]:
        """Return those of these events, by id, that the ledger has. Raises LlmopsError when it cannot be asked."""

    async def close(self) -> None:
        """Let go of what it holds."""
        return


# seconds between two tries at a sink, or a store, that is away
_RETRY_DELAYS = (0.2, 0.5, 1.0, 2.0, 5.0)


def retry_delay(failures: int) -> float:
    """Seconds to wait when `failures` tries have failed before this one."""
    return _RETRY_DELAYS[min(failures, len(_RETRY_DELAYS) - 1)]


class Prices(Protocol):
    """What tokens cost."""

    def bill(self, model: str, usage: Usage, at: datetime) -> tuple[int, str | None]:
        """Micro-dollars by the price in force at `at`, and its id; without a price (0, None)."""
        ...


class NoPrices:
    """Leaves it to the ledger, which knows the prices of every moment."""

    def bill(self, model: str, usage: Usage, at: datetime) -> tuple[int, str | None]:
        return 0, None
