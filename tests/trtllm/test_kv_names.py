"""TensorRT-LLM's KV-cache events, as its serializer writes them, in the names that gateways know."""

from __future__ import annotations

import importlib
import struct
import sys
from typing import Any

import numpy as np
import pytest

from llmops.contract import KV_CLEARED, KV_REMOVED, KV_STORED
from llmops.kv_blocks import adapter_salt, block_hashes
from tests.support.model_code import version_folder

SIZE = 4


@pytest.fixture
def names():
    sys.path.insert(0, str(version_folder("tensorrt_llm")))
    try:
        yield importlib.import_module("llmops_engine.kv_events").KvEventTranslator(SIZE)
    finally:
        sys.path.pop(0)


def stored(parent: int | None, *blocks: tuple[int, list[int]], window: int = 4096) -> dict[str, Any]:
    tokens = [
        [{"type": "unique_token", "token_id": one, "token_extra_id": 0} for one in tokens] for _, tokens in blocks
    ]
    listed = [
        {"type": "stored_block", "block_hash": own, "tokens": some, "cache_level": 0, "priority": 35}
        for (own, _), some in zip(blocks, tokens, strict=True)
    ]
    return {"event_id": 0, "window_size": window, "data": {"type": "stored", "parent_hash": parent, "blocks": listed}}


def removed(*hashes: int, window: int = 4096) -> dict[str, Any]:
    return {"event_id": 1, "window_size": window, "data": {"type": "removed", "block_hashes": list(hashes)}}


def created() -> dict[str, Any]:
    return {"event_id": 0, "window_size": 4096, "data": {"type": "created", "num_blocks_per_cache_level": [9, 0]}}


def ours(ids: list[int], salt: int = 0) -> list[int]:
    return block_hashes(struct.pack(f"<{len(ids)}i", *ids), SIZE, salt)


def test_blocks_are_named_by_all_that_comes_before_them(names) -> None:
    a, b, c = ours([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9])
    assert names.translate([created(), stored(None, (70, [1, 2, 3, 4]), (71, [5, 6, 7, 8]))]) == [
        (KV_CLEARED, ()),
        (KV_STORED, [a, b]),
    ]
    assert names.translate([stored(71, (72, [9, 9, 9, 9]))]) == [(KV_STORED, [c])]
    assert names.translate([removed(72, 71, 4711)]) == [(KV_REMOVED, [c, b])]


def test_each_window_says_the_same_again_and_is_heard_once(names) -> None:
    (a,) = ours([1, 2, 3, 4])
    first, again = stored(None, (7, [1, 2, 3, 4])), stored(None, (7, [1, 2, 3, 4]), window=128)
    assert names.translate([first, again, removed(7, window=128)]) == [(KV_STORED, [a])]


def test_first_blocks_are_those_of_the_requests_that_sent_them(names) -> None:
    """Two tenants and an adapter with one beginning: the library keeps them apart and does not say whose is which."""
    ids = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    for salt, adapter in ((11, 0), (22, 0), (11, 0), (0, 3)):
        names.expect_request(ids, salt, adapter)
    begins = [stored(None, (at, [1, 2, 3, 4])) for at in (1, 2, 3, 4)]
    salts = [11, 22, adapter_salt(0, 3), 0]
    assert names.translate(begins) == [(KV_STORED, [ours([1, 2, 3, 4], salt)[0]]) for salt in salts]
    assert names.translate([stored(2, (5, [5, 6, 7, 8]))]) == [(KV_STORED, ours([1, 2, 3, 4, 5, 6, 7, 8], 22)[1:])]
    names.expect_request(ids, 11, 0)
    names.translate([removed(1)])
    names.expect_request(ids, 11, 0)
    assert names.translate([stored(None, (6, [1, 2, 3, 4]))]) == [(KV_STORED, ours([1, 2, 3, 4], 11))]
