"""What a gateway is told of the KV cache: changes in order or, if it fell too far behind, all that is there."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from llmops_contract import KV_CLEARED, KV_REMOVED, KV_STORED

from ..engine_runtime import KvCacheEvent

# names that wait for one gateway before they are given up for a fresh start
MAX_QUEUED_HASHES = 65_536
# names in one message (512 KiB)
MAX_HASHES_PER_MESSAGE = 65_536


class KvCacheContents:
    """The names of all blocks that the engine's cache has, oldest first."""

    def __init__(self) -> None:
        self._names: dict[int, None] = {}

    def apply(self, changes: Iterable[KvCacheEvent]) -> None:
        for kind, names in changes:
            if kind == KV_STORED:
                self._names.update(dict.fromkeys(names))
            elif kind == KV_REMOVED:
                for name in names:
                    self._names.pop(name, None)
            else:
                self._names.clear()

    def names(self) -> list[int]:
        return list(self._names)


class KvEventQueue:
    """What one gateway still has to be told."""

    def __init__(self, holdings: KvCacheContents) -> None:
        self._holdings = holdings
        # None: everything, anew
        self._changes: list[KvCacheEvent] | None = None
        self._size = 0

    def __bool__(self) -> bool:
        return self._changes is None or bool(self._changes)

    def add(self, changes: Iterable[KvCacheEvent]) -> None:
        for change in changes:
            self._size += len(change.names)
            if self._changes is not None:
                self._changes.append(change)
        if self._changes is not None and self._size > MAX_QUEUED_HASHES:
            self._changes = None

    def take(self) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """At most MAX_HASHES_PER_MESSAGE names, UINT64, and the kind and count of each run of them; the rest waits."""
        if self._changes is None:
            self._changes = [KvCacheEvent(KV_CLEARED), KvCacheEvent(KV_STORED, self._holdings.names())]
        names: list[int] = []
        kinds: list[tuple[int, int]] = []
        while self._changes and len(names) < MAX_HASHES_PER_MESSAGE:
            kind, some = self._changes[0]
            room = MAX_HASHES_PER_MESSAGE - len(names)
            names += some[:room]
            kinds.append((kind, len(some[:room])))
            self._changes[0:1] = [KvCacheEvent(kind, some[room:])] if len(some) > room else []
        self._size = sum(len(change.names) for change in self._changes)
        return np.array(names, np.uint64), kinds
