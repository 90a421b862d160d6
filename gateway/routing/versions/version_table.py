"""The versions of all models as of one moment, and the choice of a version. Pure: no clock, no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from llmops.gateway.interfaces import Caller

#: Characters of a prompt that identify a conversation which has no id.
PROMPT_CHARACTERS = 1000
#: Fields of request bodies that name a conversation or an end user, the narrowest first.
_ID_FIELDS = ("conversation_id", "conversation", "prompt_cache_key", "user")


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version of a model.

    Attributes:
        replicas: Addresses as in the setting `replicas`; empty for those of the settings.
        weight: Percent of the requests.
        is_retired: True if its replicas are not used any longer.
    """

    name: str
    replicas: frozenset[str] = frozenset()
    weight: float = 0.0
    is_retired: bool = False


@dataclass(frozen=True, slots=True)
class VersionTable:
    """The versions by model, the oldest first, and the pins of keys by model and key id."""

    models: Mapping[str, Sequence[ServedVersion]] = field(default_factory=lambda: MappingProxyType({}))
    pins: Mapping[tuple[str, str], str] = field(default_factory=lambda: MappingProxyType({}))

    def version_of(self, model: str, address: str) -> str | None:
        """Return the version of a replica, or None if the version is retired.

        Replicas that no version lists belong to the oldest version, and the replicas of a model
        without versions to the version with an empty name.

        Args:
            model: The model's name.
            address: The replica's address as in the setting `replicas`.
        """
        versions = self.models.get(model)
        if not versions:
            return ""
        listed = (version for version in reversed(versions) if address in version.replicas)
        found = next(listed, versions[0])
        return None if found.is_retired else found.name

    def names(self, model: str) -> Sequence[str]:
        """Return the versions in use, the oldest first."""
        return [version.name for version in self.models.get(model, ()) if not version.is_retired]

    def preferred(self, model: str) -> Sequence[str]:
        """Return the versions in use, the one with the most requests first."""
        weights = {version.name: version.weight for version in self.models.get(model, ())}
        return sorted(self.names(model), key=lambda name: -weights[name])

    def weight(self, model: str, name: str) -> float:
        """Return the percent of the requests that a version gets, 0 for an unknown version."""
        return next((version.weight for version in self.models.get(model, ()) if version.name == name), 0.0)

    def is_split(self, model: str) -> bool:
        """Return True if several versions of a model get requests."""
        return sum(version.weight > 0 for version in self.models.get(model, ())) > 1

    def is_judged(self, model: str) -> bool:
        """Return True while a roll-out compares versions, from the start of the new replicas on."""
        active = [version for version in self.models.get(model, ()) if not version.is_retired]
        return len(active) > 1 and active[-1].weight < 100

    def choose(self, model: str, conversation: str, key_id: str = "") -> str:
        """Return the version for a request; empty for a model without versions.

        The requests of a conversation stay on a version while its weight does not fall: the
        youngest version has the lowest hashes, so a conversation that it has got stays with it.

        Args:
            model: The model's name.
            conversation: The conversation's key (`conversation_key`).
            key_id: The caller's API key.
        """
        versions = self.models.get(model)
        if not versions:
            return ""
        pinned = self.pins.get((model, key_id)) if key_id else None
        active = {version.name: version.weight for version in reversed(versions) if not version.is_retired}
        if pinned in active:
            return str(pinned)
        weights = {name: weight for name, weight in active.items() if weight > 0}
        if len(weights) == 1:
            return next(iter(weights))
        youngest = next(iter(weights), versions[-1].name)
        digest = hashlib.blake2b(f"{model}\0{youngest}\0{conversation}".encode(), digest_size=8).digest()
        point = int.from_bytes(digest) / 2**64 * (sum(weights.values()) or 100.0)
        for name, weight in weights.items():
            point -= weight
            if point < 0:
                return name
        return versions[0].name


def conversation_key(body: object, caller: Caller) -> str:
    """Return a text that is the same for all requests of a conversation.

    It is the first of: the conversation's id, the client's cache key or end user, the messages up
    to the first of a user, the beginning of the prompt. Without any of them it is the caller alone.
    """
    for name in _ID_FIELDS:
        value = getattr(body, name, None)
        if value:
            return f"{caller.owner}\0{value}"
    parts: list[str] = []
    for message in getattr(body, "messages", None) or ():
        parts.append(str(getattr(message, "content", ""))[:PROMPT_CHARACTERS])
        if getattr(message, "role", "") == "user":
            break
    prompt = "\0".join(parts) or str(getattr(body, "prompt", None) or "")[:PROMPT_CHARACTERS]
    return f"{caller.owner or caller.share}\0{prompt}"
