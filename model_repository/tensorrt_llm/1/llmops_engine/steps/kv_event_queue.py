"""A queue of KV-cache events for one gateway.

The gateway receives the events in order, or a full snapshot if the gateway fell too far behind.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from llmops_contract import KV_CLEARED, KV_REMOVED, KV_STORED

from ..engine_runtime import KvCacheEvent

#: Block hashes that queue up for one gateway before a snapshot replaces them.
MAX_QUEUED_HASHES = 65_536
#: Block hashes in one message (512 KiB).
MAX_HASHES_PER_MESSAGE = 65_536


class KvCacheContents:
    """The hashes of all blocks in the engine's cache, oldest first."""

    def __init__(self) -> None:
        self._hashes: dict[int, None] = {}

    def apply(self, events: Iterable[KvCacheEvent]) -> None:
        """Update the contents."""
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
    """Cache events not yet sent to one gateway.

    If too many queue up, a full snapshot replaces them.
    """

    def __init__(self, contents: KvCacheContents) -> None:
        self._contents = contents
        # None stands for a snapshot, which is made when it is sent
        self._events: list[KvCacheEvent] | None = None
        self._size = 0

    def __bool__(self) -> bool:
        return self._events is None or bool(self._events)

    def add(self, events: Iterable[KvCacheEvent]) -> None:
        """Queue events."""
        for event in events:
            self._size += len(event.names)
            if self._events is not None:
                self._events.append(event)
        if self._events is not None and self._size > MAX_QUEUED_HASHES:
            self._events = None

    def take(self) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Remove at most MAX_HASHES_PER_MESSAGE hashes from the queue.

        Returns:
            The hashes, UINT64, and the kind and length of each run of them.
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
