"""TensorRT-LLM's KV-cache events, as its serializer writes them, in the names that gateways know."""

import struct
from typing import Any

import numpy as np
import pytest
from llmops_engine.kv_events import KvEventTranslator

from llmops.contract import KV_CLEARED, KV_REMOVED, KV_STORED
from llmops.kv_blocks import adapter_salt, block_hashes

SIZE = 4


@pytest.fixture
def names():
    return KvEventTranslator(SIZE)


def stored(parent: int | None, *blocks: tuple[int | str, list[int]], window: int = 4096) -> dict[str, Any]:
    tokens = [[{"type": "unique_token", "token_id": one, "token_extra_id": 0} for one in block] for _, block in blocks]
    listed = [
        {"type": "stored_block", "block_hash": own, "tokens": some, "cache_level": 0, "priority": 35}
        for (own, _), some in zip(blocks, tokens, strict=True)
    ]
    return {"event_id": 0, "window_size": window, "data": {"type": "stored", "parent_hash": parent, "blocks": listed}}


def removed(*hashes: int | str, window: int = 4096) -> dict[str, Any]:
    return {"event_id": 1, "window_size": window, "data": {"type": "removed", "block_hashes": list(hashes)}}


def created() -> dict[str, Any]:
    return {"event_id": 0, "window_size": 4096, "data": {"type": "created", "num_blocks_per_cache_level": [9, 0]}}


def ours(ids: list[int], salt: int = 0) -> list[int]:
    return block_hashes(struct.pack(f"<{len(ids)}i", *ids), SIZE, salt)


def test_blocks_are_named_by_all_that_comes_before_them(names) -> None:
    a, b, c = ours([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9])
    begin = [created(), stored(None, (70, [1, 2, 3, 4]), (71, [5, 6, 7, 8]))]
    assert names.translate(begin) == [(KV_CLEARED, ()), (KV_STORED, [a, b])]
    assert names.translate([stored(71, (72, [9, 9, 9, 9]))]) == [(KV_STORED, [c])]
    assert names.translate([removed(72, 71, 4711)]) == [(KV_REMOVED, [c, b])]


def test_lost_events_clear_what_is_known(names) -> None:
    """A full buffer loses its oldest events (1.2.1 cpp/tensorrt_llm/batch_manager/kvCacheEventManager.cpp,
    worker: "Events have been discarded"), and `enqueue…Event` numbers each, whatever its window.
    """
    (a,), (b,) = ours([1, 2, 3, 4]), ours([5, 6, 7, 8])
    other_window = {**stored(None, (70, [1, 2, 3, 4]), window=128), "event_id": 1}
    assert names.translate([stored(None, (70, [1, 2, 3, 4])), other_window]) == [(KV_STORED, [a])]
    later = [{**stored(None, (80, [5, 6, 7, 8])), "event_id": 7}, {**removed(70), "event_id": 8}]
    assert names.translate(later) == [(KV_CLEARED, ()), (KV_STORED, [b])]


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


def test_groups_of_layers_report_each_block_and_give_it_up_alone(names) -> None:
    """KV cache manager V2, which 1.4 makes the default, as its `_event_manager.py` at 1c39d359 writes events.

    Every event comes once per group of layers, hashes are texts, the parent of a first block is None,
    and consecutive blocks are one event, also the partly filled last. A tenant's salt must be used once.
    """
    groups = {0: 128, 1: 4096, 2: 4096}
    prompt = list(range(1, 11))
    blocks = [prompt[at : at + SIZE] for at in range(0, len(prompt), SIZE)]

    def said(*events):
        return [{**one, "window_size": groups[at], "layer_group_id": at} for one in events for at in groups]

    assert names.translate(said(created())) == [(KV_CLEARED, ())] * 2
    for salt in (11, 22):
        names.expect_request(np.array(prompt), salt, 0)
    events = [stored(None, *((f"{salt}-{at}", block) for at, block in enumerate(blocks))) for salt in (11, 22)]
    assert names.translate(said(*events)) == [(KV_STORED, ours(prompt[:8], salt)) for salt in (11, 22)]
    of_groups = [{**removed("22-0", window=128), "layer_group_id": 0}, {**removed("22-1"), "layer_group_id": 1}]
    assert names.translate(of_groups) == [(KV_REMOVED, ours(prompt[:8], 22)[1:])]
