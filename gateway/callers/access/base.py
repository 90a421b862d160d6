"""Where callers are found by what they send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from llmops.gateway.messages import Caller


class Directory(ABC):
    """Knows callers by their credentials. What is sent stays here: no message, log line or caller has any of it."""

    foreign = "What was sent is not an API key of this gateway; such a key is sk-llmops- and 32 letters or digits."
    """For who sent what it does not take."""

    @abstractmethod
    def takes(self, credential: str) -> bool:
        """Whether it has the form of one that could be known here. Costs no look-up."""

    def known(self, credential: str) -> Caller | None:
        """Whose it is, where that was found lately and is still true; None where `find` must be asked.

        Raises InvalidKeyError for one that is over.
        """
        return None

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


class Members(Protocol):
    """Tenants and their users, where callers come from elsewhere."""

    async def member(self, tenant: str, user: str, scopes: frozenset[str], until: float) -> Caller:
        """`user` (an address) of `tenant`, made where there is none; with the tenant's quotas.

        Raises InvalidKeyError for a tenant or user that cannot be, UnavailableError where nobody can say.
        """
        ...
