"""Where callers are found by what they send."""

from __future__ import annotations

from abc import ABC, abstractmethod

from llmops.gateway.messages import Caller


class Directory(ABC):
    """Knows callers by their credentials. What is sent stays here: no message, log line or caller has any of it."""

    @abstractmethod
    def takes(self, credential: str) -> bool:
        """Whether it has the form of one that could be known here. Costs no look-up."""

    @abstractmethod
    async def find(self, credential: str) -> Caller | None:
        """Whose it is; None for one that nobody has.

        Raises InvalidKeyError for one that is over (expired, revoked), UnavailableError where nobody can say.
        """

    @abstractmethod
    async def has_any(self) -> bool:
        """Whether there ever was a credential, also one that is over. Raises UnavailableError."""

    async def close(self) -> None:
        """Let go of what it holds."""
        return
