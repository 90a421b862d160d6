"""Translation of TensorRT-LLM's KV-cache events to the block hashes that gateways use.

llmops_kv_blocks computes the hashes that gateways use. The library's own hashes have no meaning
outside of the library, but each stored block comes with its tokens and the hash of the block before
it. The event of a first block does not name the request, whose salt and adapter are only in the
library's hash. So first blocks are matched, in order, with the requests that sent the same tokens.
Source: NVIDIA/TensorRT-LLM `tensorrt_llm/_utils.py`, KVCacheEventSerializer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from llmops_contract import KV_CLEARED, KV_REMOVED, KV_STORED
from llmops_kv_blocks import adapter_salt, block_hashes

from .engine_runtime import KvCacheEvent

#: Maximum number of first blocks whose salts are remembered until the library stores the blocks.
#: Bounds memory if the library loses events.
MAX_FIRST_BLOCKS = 4096


class KvEventTranslator:
    """A translator from the library's hash of each reported block to the gateways' hash."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._hashes: dict[Any, int] = {}
        self._known_hashes: set[int] = set()
        # salts of requests whose first block has not been stored yet, by the block's tokens
        self._salts: OrderedDict[bytes, deque[int]] = OrderedDict()
        # attention window and negated number of the layer group whose events are translated
        self._followed: tuple[int, int] | None = None
        self._last_id: int | None = None

    def expect_request(self, ids: np.ndarray, cache_salt: int, adapter: int) -> None:
        """Remember the salt of a new request until the library stores the request's first block."""
        first = ids[: self._tokens_per_block].astype(np.int32).tobytes()
        salt = adapter_salt(cache_salt, adapter)
        if not salt or len(first) < 4 * self._tokens_per_block:
            return
        if block_hashes(first, self._tokens_per_block, salt)[0] in self._known_hashes:
            return
        waiting = self._salts.setdefault(first, deque())
        if salt not in waiting:
            waiting.append(salt)
        if len(self._salts) > MAX_FIRST_BLOCKS:
            self._salts.popitem(last=False)

    def translate(self, events: Iterable[Mapping[str, Any]]) -> list[KvCacheEvent]:
        """Return the changes of the cache that the library's events report, in order.

        Each group of layers with an attention window of its own reports the same blocks again
        (TensorRT-LLM 1.4 numbers the groups; earlier releases distinguish groups only by their
        window). Only the events of the group with the largest window are translated, or of the
        first group among groups with equal windows. TensorRT-LLM makes the same choice for its own
        event stream (`runtime/kv_cache_manager_v2`, `set_layer_group_window_sizes`).
        """
        changes: list[KvCacheEvent] = []
        for event in events:
            data = event["data"]
            if self._misses_events(event["event_id"]):
                changes.append(self._clear())
            group = (event.get("window_size") or 0, -(event.get("layer_group_id") or 0))
            if self._followed is None or (data["type"] == "created" and group > self._followed):
                self._followed = group
            if group != self._followed:
                continue
            if data["type"] == "created":
                changes.append(self._clear())
            elif data["type"] == "stored":
                changes.append(KvCacheEvent(KV_STORED, self._store(data)))
            elif data["type"] == "removed":
                removed = [self._hashes.pop(block) for block in data["block_hashes"] if block in self._hashes]
                self._known_hashes.difference_update(removed)
                changes.append(KvCacheEvent(KV_REMOVED, removed))
        return [change for change in changes if change.names or change.kind == KV_CLEARED]

    def _misses_events(self, event_id: int) -> bool:
        """Return True if events before this one were lost.

        The library numbers all events, so a gap in the numbers shows a loss. The library drops the
        oldest event of a full buffer, and the result of a failed read
        (batch_manager/kvCacheEventManager.cpp, worker; executor/proxy.py, get_kv_events).
        """
        last, self._last_id = self._last_id, event_id
        return last is not None and event_id > last + 1

    def _clear(self) -> KvCacheEvent:
        self._hashes.clear()
        self._known_hashes.clear()
        return KvCacheEvent(KV_CLEARED)

    def _store(self, data: Mapping[str, Any]) -> list[int]:
        parent, hashes = data.get("parent_hash"), []
        salt = self._hashes.get(parent) if parent else None
        if parent and salt is None:
            # without the hash of the block before it, this block's hash cannot be computed
            return []
        for block in data["blocks"]:
            tokens = np.array([token["token_id"] for token in block["tokens"]], np.int32).tobytes()
            if len(tokens) != 4 * self._tokens_per_block:
                break
            salt = block_hashes(tokens, self._tokens_per_block, self._take_salt(tokens) if salt is None else salt)[0]
            self._hashes[block["block_hash"]] = salt
            hashes.append(salt)
        self._known_hashes.update(hashes)
        return hashes

    def _take_salt(self, first: bytes) -> int:
        """Return the salt of the oldest request that waits for this first block, or 0."""
        waiting = self._salts.get(first)
        salt = waiting.popleft() if waiting else 0
        if waiting is not None and not waiting:
            del self._salts[first]
        return salt
