"""An estimate of the blocks in a KV cache, for libraries that do not report their blocks.

All gateways share one estimate, because the engine sees the texts of all of them.
"""

from __future__ import annotations

from collections import OrderedDict

from llmops_contract import KV_CLEARED, KV_REMOVED, KV_STORED
from llmops_kv_blocks import adapter_salt, block_hashes

from .engine_runtime import KvCacheEvent


class RecentBlocks:
    """An estimate of the blocks in a cache: the `capacity` most recently used blocks.

    The last blocks of a text are evicted before the first.
    """

    def __init__(self, capacity: int, tokens_per_block: int) -> None:
        self._capacity, self._tokens_per_block = capacity, tokens_per_block
        self._hashes: OrderedDict[int, None] = OrderedDict()
        self._events: list[KvCacheEvent] = []

    def touch(self, ids: bytes, salt: int, adapter: int) -> None:
        """Record that the cache stored or reused a text. `ids` are the text's INT32 tokens."""
        hashes = block_hashes(ids, self._tokens_per_block, adapter_salt(salt, adapter))[: self._capacity]
        stored = [block for block in hashes if block not in self._hashes]
        for block in reversed(hashes):
            self._hashes[block] = None
            self._hashes.move_to_end(block)
        removed = [self._hashes.popitem(last=False)[0] for _ in range(len(self._hashes) - self._capacity)]
        changes = ((KV_REMOVED, removed), (KV_STORED, stored))
        self._events += [KvCacheEvent(kind, blocks) for kind, blocks in changes if blocks]

    def clear(self) -> None:
        """Record that the cache was cleared."""
        self._hashes.clear()
        self._events = [KvCacheEvent(KV_CLEARED)]

    def take_events(self) -> list[KvCacheEvent]:
        """Return the changes of the estimate since the last call, in order."""
        events, self._events = self._events, []
        return events
