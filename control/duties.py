"""What one control process does at a time, whichever of several it is."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Duty(ABC):
    """Work of the process that leads: the ledger, the reconciler. `name` is what logs call it."""

    name: str = ""

    @abstractmethod
    async def run(self) -> None:
        """Until it is cancelled, after which it holds nothing. What it raises is logged, and it is begun again."""
