"""A queue of KV-cache events for one gateway.

The gateway receives the events in order, or a snapshot of the cache if it fell too far behind.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from llmops_contract import KV_CLEARED, KV_REMOVED, KV_STORED

from ..engine_runtime import KvCacheEvent

#: Maximum number of block hashes that wait for one gateway. A snapshot of the cache replaces more,
#: which bounds the memory for a slow gateway.
MAX_QUEUED_HASHES = 65_536
#: Maximum number of block hashes in one message. At 8 bytes each they take 512 KiB, so that a
#: message does not delay the tokens of a step.
MAX_HASHES_PER_MESSAGE = 65_536


class KvCacheContents:
    """The hashes of all blocks in the engine's cache, oldest first."""

    def __init__(self) -> None:
        self._hashes: dict[int, None] = {}

    def apply(self, events: Iterable[KvCacheEvent]) -> None:
        """Apply a change of the cache to the contents."""
        for kind, hashes in events:
            if kind == KV_STORED:
                self._hashes.update(dict.fromkeys(hashes))
            elif kind == KV_REMOVED:
                for block in hashes:
                    self._hashes.pop(block, None)
            else:
                self._hashes.clear()

    def hashes(self) -> list[int]:
        """Return the hashes of all blocks."""
        return list(self._hashes)


class KvEventQueue:
    """The cache events that wait for one gateway.

    If too many events wait, a snapshot of the cache replaces them.
    """

    def __init__(self, contents: KvCacheContents) -> None:
        self._contents = contents
        # None stands for a snapshot, which is taken only when it is sent
        self._events: list[KvCacheEvent] | None = None
        self._size = 0

    def __bool__(self) -> bool:
        return self._events is None or bool(self._events)

    def add(self, events: Iterable[KvCacheEvent]) -> None:
        """Append events to the queue."""
        for event in events:
            self._size += len(event.names)
            if self._events is not None:
                self._events.append(event)
        if self._events is not None and self._size > MAX_QUEUED_HASHES:
            self._events = None

    def take(self) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Remove at most MAX_HASHES_PER_MESSAGE hashes from the queue.

        Returns:
            The hashes as UINT64, and for each run of hashes with the same kind of event, the kind
            and the number of hashes.
        """
        if self._events is None:
            self._events = [KvCacheEvent(KV_CLEARED), KvCacheEvent(KV_STORED, self._contents.hashes())]
        hashes: list[int] = []
        kinds: list[tuple[int, int]] = []
        while self._events and len(hashes) < MAX_HASHES_PER_MESSAGE:
            kind, blocks = self._events[0]
            room = MAX_HASHES_PER_MESSAGE - len(hashes)
            hashes += blocks[:room]
            kinds.append((kind, len(blocks[:room])))
            self._events[0:1] = [KvCacheEvent(kind, blocks[room:])] if len(blocks) > room else []
        self._size = sum(len(event.names) for event in self._events)
        return np.array(hashes, np.uint64), kinds
