"""Where callers are found by what they send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from llmops.gateway.errors import UnavailableError
from llmops.gateway.interfaces import Caller


class CredentialUnavailableError(UnavailableError):
    """503: one credential cannot be judged now. Others are looked up as before, and nothing is remembered."""

    def __init__(self, detail: str = "") -> None:
        super().__init__("This token cannot be checked now; try again.", code="keys_unavailable", detail=detail)


class Identity(NamedTuple):
    """A person as an identity provider knows it."""

    issuer: str
    subject: str


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

        Raises InvalidKeyError for one that is over (expired, revoked), UnavailableError where nobody can say,
        CredentialUnavailableError where nobody can say it of this one.
        """

    @abstractmethod
    async def has_credentials(self) -> bool:
        """Whether there ever was a credential, also one that is over. Raises UnavailableError."""

    async def ended(self, keys: Sequence[str]) -> Collection[str]:
        """Return the keys (ids) among `keys` whose running answers must end. Raises UnavailableError."""
        return ()

    async def close(self) -> None:
        """Let go of what it holds."""
        return


class MemberDirectory(Protocol):
    """Tenants and their users, where callers come from elsewhere."""

    async def member(self, tenant: str, user: str, identity: Identity, scopes: frozenset[str], until: float) -> Caller:
        """`user` (an address) of `tenant`, made where there is none; with the tenant's quotas. From the first time on
        the user is bound to `identity`: another identity with the same address is another person, and is refused.

        Raises InvalidKeyError for a tenant or user that cannot be, UnavailableError where nobody can say.
        """
        ...
