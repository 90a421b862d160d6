"""An immutable table of all models' versions, and the choice of a version.

The code is pure: it uses neither a clock nor I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from llmops.gateway.interfaces import Caller

#: Number of leading characters of a prompt that identify a conversation without an id. Later turns
#: begin with the same characters.
PROMPT_CHARACTERS = 1000
#: Fields of request bodies that name a conversation or an end user, the most specific first.
_ID_FIELDS = ("conversation_id", "conversation", "prompt_cache_key", "user")


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version of a model.

    Attributes:
        name: Name of the version.
        replicas: Addresses in the form of the setting `replicas`. Empty for the replicas of the
            settings.
        weight: Percentage of the requests that the version gets.
        is_retired: True if its replicas are no longer used.
    """

    name: str
    replicas: frozenset[str] = frozenset()
    weight: float = 0.0
    is_retired: bool = False


@dataclass(frozen=True, slots=True)
class VersionTable:
    """The versions of each model, the oldest first, and the pinned version by model and key id."""

    models: Mapping[str, Sequence[ServedVersion]] = field(default_factory=lambda: MappingProxyType({}))
    pins: Mapping[tuple[str, str], str] = field(default_factory=lambda: MappingProxyType({}))

    def version_of(self, model: str, address: str) -> str | None:
        """Return the version of a replica, or None if the version is retired.

        Replicas that no version lists belong to the oldest version. The replicas of a model without
        versions belong to the version "".

        Args:
            model: Name of the model.
            address: Address of the replica in the form of the setting `replicas`.
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
        """Return the versions in use, the version with the most requests first."""
        weights = {version.name: version.weight for version in self.models.get(model, ())}
        return sorted(self.names(model), key=lambda name: -weights[name])

    def weight(self, model: str, name: str) -> float:
        """Return the percentage of requests that a version gets, 0 for an unknown version."""
        return next((version.weight for version in self.models.get(model, ()) if version.name == name), 0.0)

    def is_split(self, model: str) -> bool:
        """Return True if several versions of a model get requests."""
        return sum(version.weight > 0 for version in self.models.get(model, ())) > 1

    def is_judged(self, model: str) -> bool:
        """Return True while a roll-out compares versions, from the start of the new replicas on."""
        active = [version for version in self.models.get(model, ()) if not version.is_retired]
        return len(active) > 1 and active[-1].weight < 100

    def choose(self, model: str, conversation: str, key_id: str = "") -> str:
        """Return the version for a request, or "" for a model without versions.

        The requests of a conversation stay on a version while its weight does not fall. The
        youngest version gets the lowest hashes, so a conversation that has moved to it stays there.

        Args:
            model: Name of the model.
            conversation: Key of the conversation, from `conversation_key`.
            key_id: Id of the caller's API key.
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

    The text is the first that exists of: the conversation's id, the client's cache key or end user,
    the messages up to the user's first message, the beginning of the prompt. If none exists, the
    text is the caller alone.
    """
    # Only declared fields are here; the types of others are not checked.
    fields = vars(body)
    for name in _ID_FIELDS:
        value = fields.get(name)
        if value:
            return f"{caller.owner}\0{value}"
    parts: list[str] = []
    for message in fields.get("messages") or ():
        parts.append(str(getattr(message, "content", ""))[:PROMPT_CHARACTERS])
        if getattr(message, "role", "") == "user":
            break
    prompt = "\0".join(parts) or str(fields.get("prompt") or "")[:PROMPT_CHARACTERS]
    return f"{caller.owner or caller.share}\0{prompt}"
