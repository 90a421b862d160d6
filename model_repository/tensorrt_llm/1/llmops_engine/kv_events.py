"""TensorRT-LLM's KV-cache events, with the block names that gateways know (llmops_kv_blocks).

The library's own hashes mean nothing outside of it, but each block that it stores comes with its tokens and the block
before. It does not say whose a first block is: salt and adapter are in the hash alone. So first blocks are matched with
the requests that sent them, in order. Source: NVIDIA/TensorRT-LLM `tensorrt_llm/_utils.py`, KVCacheEventSerializer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from llmops_contract import KV_CLEARED, KV_REMOVED, KV_STORED
from llmops_kv_blocks import adapter_salt, block_hashes

from .engine_runtime import KvCacheEvent

# first blocks whose requests are remembered
MAX_FIRST_BLOCKS = 4096


class KvEventTranslator:
    """Keeps the name of each block that the library has reported."""

    def __init__(self, tokens_per_block: int) -> None:
        self._size = tokens_per_block
        self._names: dict[Any, int] = {}
        self._first: OrderedDict[bytes, deque[int]] = OrderedDict()
        self._known: set[int] = set()
        self._window: int | None = None

    def asked(self, ids: np.ndarray, cache_salt: int, adapter: int) -> None:
        """A request arrived, whose first block will be stored unless it is there already."""
        first = ids[: self._size].astype(np.int32).tobytes()
        salt = adapter_salt(cache_salt, adapter)
        if not salt or len(first) < 4 * self._size or block_hashes(first, self._size, salt)[0] in self._known:
            return
        waiting = self._first.setdefault(first, deque())
        if salt not in waiting:
            waiting.append(salt)
        if len(self._first) > MAX_FIRST_BLOCKS:
            self._first.popitem(last=False)

    def read(self, events: Iterable[Mapping[str, Any]]) -> list[KvCacheEvent]:
        """What became of the cache, in order."""
        changes: list[KvCacheEvent] = []
        for event in events:
            # layers with an attention window of their own report the same again
            window = event.get("window_size")
            self._window = window if self._window is None else self._window
            data = event["data"]
            if window != self._window:
                continue
            if data["type"] == "created":
                self._names.clear()
                self._known.clear()
                changes.append(KvCacheEvent(KV_CLEARED))
            elif data["type"] == "stored":
                changes.append(KvCacheEvent(KV_STORED, self._stored(data)))
            elif data["type"] == "removed":
                gone = [self._names.pop(one) for one in data["block_hashes"] if one in self._names]
                self._known.difference_update(gone)
                changes.append(KvCacheEvent(KV_REMOVED, gone))
        return [change for change in changes if change.names or change.kind == KV_CLEARED]

    def _stored(self, data: Mapping[str, Any]) -> list[int]:
        parent, names = data.get("parent_hash"), []
        salt = self._names.get(parent) if parent else None
        if parent and salt is None:
            # its beginning was not reported, or not completely
            return []
        for block in data["blocks"]:
            tokens = np.array([token["token_id"] for token in block["tokens"]], np.int32).tobytes()
            if len(tokens) != 4 * self._size:
                break
            salt = block_hashes(tokens, self._size, self._salt(tokens) if salt is None else salt)[0]
            self._names[block["block_hash"]] = salt
            names.append(salt)
        self._known.update(names)
        return names

    def _salt(self, first: bytes) -> int:
        waiting = self._first.get(first)
        salt = waiting.popleft() if waiting else 0
        if waiting is not None and not waiting:
            del self._first[first]
        return salt
