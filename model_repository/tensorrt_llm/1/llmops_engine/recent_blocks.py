"""Which blocks a KV cache has, for libraries that do not say: those of the texts used last, as many as fit.

An approximation, but the same one for all gateways, because it is made where the texts of all of them come together.
"""

from __future__ import annotations

from collections import OrderedDict

from llmops_contract import KV_CLEARED, KV_REMOVED, KV_STORED
from llmops_kv_blocks import adapter_salt, block_hashes

from .engine_runtime import KvCacheEvent


class RecentBlocks:
    """`capacity`: blocks of the cache; least recently used ones go first, the end of a text before its beginning."""

    def __init__(self, capacity: int, tokens_per_block: int) -> None:
        self._capacity, self._tokens_per_block = capacity, tokens_per_block
        self._names: OrderedDict[int, None] = OrderedDict()
        self._changes: list[KvCacheEvent] = []

    def use(self, ids: bytes, salt: int, adapter: int) -> None:
        """A text went through the cache. `ids`: INT32."""
        names = block_hashes(ids, self._tokens_per_block, adapter_salt(salt, adapter))[: self._capacity]
        new = [name for name in names if name not in self._names]
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        gone = [self._names.popitem(last=False)[0] for _ in range(len(self._names) - self._capacity)]
        self._changes += [KvCacheEvent(kind, some) for kind, some in ((KV_REMOVED, gone), (KV_STORED, new)) if some]

    def clear(self) -> None:
        """The cache has been emptied."""
        self._names.clear()
        self._changes = [KvCacheEvent(KV_CLEARED)]

    def changes(self) -> list[KvCacheEvent]:
        """Since the last call."""
        changes, self._changes = self._changes, []
        return changes
