"""More than one kind of credential."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llmops.gateway.auth.directory import Directory
from llmops.gateway.errors import InvalidKeyError
from llmops.gateway.interfaces import Caller


class CombinedDirectory(Directory):
    """Each credential is the first directory's that takes its form: that one of them is away stops no other."""

    foreign = (
        "What was sent is neither an API key of this gateway (they begin with sk-llmops-) nor a token (JWT) of its "
        "identity provider."
    )

    def __init__(self, directories: Sequence[Directory]) -> None:
        self._directories = directories

    def takes(self, credential: str) -> bool:
        return any(one.takes(credential) for one in self._directories)

    def known(self, credential: str) -> Caller | None:
        return next(filter(None, (one.known(credential) for one in self._directories)), None)

    async def find(self, credential: str) -> Caller | None:
        for one in self._directories:
            if one.takes(credential):
                return await one.find(credential)
        raise InvalidKeyError(self.foreign)

    async def has_credentials(self) -> bool:
        """The cheapest first: one that always has some needs no store to say so."""
        for one in reversed(self._directories):
            if await one.has_credentials():
                return True
        return False

    async def ended(self, keys: Sequence[str]) -> Collection[str]:
        return {key for one in self._directories for key in await one.ended(keys)}

    async def close(self) -> None:
        for one in self._directories:
            await one.close()
