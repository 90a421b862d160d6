"""Directories, which find the caller that a credential belongs to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

from llmops.gateway.errors import InvalidKeyError, UnavailableError
from llmops.gateway.interfaces import Caller


class CredentialUnavailableError(UnavailableError):
    """An error (503) for one credential that cannot be checked now.

    Other credentials are still looked up, and this result is not cached.
    """

    def __init__(self, detail: str = "") -> None:
        super().__init__("This key or token cannot be checked now; try again.", code="keys_unavailable", detail=detail)


class Identity(NamedTuple):
    """A user of an identity provider.

    Attributes:
        issuer: The address that identifies the provider.
        subject: The provider's id of the user.
    """

    issuer: str
    subject: str


class Directory(ABC):
    """An interface that finds callers by their credentials.

    No message, log line or caller may contain a credential.
    """

    #: The message for a credential whose form this directory does not recognize.
    foreign = (
        "The credential is not an API key of this gateway; an API key is sk-llmops- and 32 letters or "
        "digits. `llmops key create` makes one."
    )

    @abstractmethod
    def takes(self, credential: str) -> bool:
        """Return True if the credential has the form of this directory's credentials.

        Nothing is looked up.
        """

    def known(self, credential: str) -> Caller | None:
        """Return the caller if a recent look-up is still valid, None if `find` must be called.

        Raises:
            InvalidKeyError: The credential has expired.
        """
        return None

    async def check(self, credential: str) -> None:
        """Check a credential as far as possible without the store.

        Raises:
            InvalidKeyError: The credential is refused.
            UnavailableError: The credential cannot be checked now.
        """
        return

    @abstractmethod
    async def find(self, credential: str) -> Caller | None:
        """Return the caller of a credential, or None for a credential that does not exist.

        Raises:
            InvalidKeyError: The credential has expired or was revoked.
            UnavailableError: The directory cannot be reached.
            CredentialUnavailableError: This credential cannot be checked now; others can.
        """

    @abstractmethod
    async def has_credentials(self) -> bool:
        """Return True if a credential was ever created, even if it has expired.

        Raises:
            UnavailableError: The directory cannot be reached.
        """

    async def ended(self, callers: Collection[Caller]) -> Collection[Caller]:
        """Return the callers among `callers` whose running answers must end.

        Raises:
            UnavailableError: The directory cannot be reached.
        """
        return ()

    async def close(self) -> None:
        """Close the connections to the store and to the identity provider."""
        return


class CombinedDirectory(Directory):
    """A directory that combines several directories.

    A credential is looked up only in the first directory that recognizes its form.
    """

    foreign = (
        "The credential is neither an API key of this gateway (they begin with sk-llmops-) nor a token (JWT) of its "
        "identity provider."
    )

    def __init__(self, directories: Sequence[Directory]) -> None:
        self._directories = directories

    def takes(self, credential: str) -> bool:
        return any(directory.takes(credential) for directory in self._directories)

    def known(self, credential: str) -> Caller | None:
        return next(filter(None, (directory.known(credential) for directory in self._directories)), None)

    async def find(self, credential: str) -> Caller | None:
        for directory in self._directories:
            if directory.takes(credential):
                return await directory.find(credential)
        raise InvalidKeyError(self.foreign)

    async def has_credentials(self) -> bool:
        # Ask the identity provider first, whose answer is always True and needs no store.
        for directory in reversed(self._directories):
            if await directory.has_credentials():
                return True
        return False

    async def ended(self, callers: Collection[Caller]) -> Collection[Caller]:
        return {caller for directory in self._directories for caller in await directory.ended(callers)}

    async def close(self) -> None:
        for directory in self._directories:
            await directory.close()
