"""The store of responses is bounded and keeps owners apart."""

import pytest

from llmops.gateway.errors import NotFoundError
from llmops.gateway.openai.responses.store import MemoryStore, StoredResponse


def entry(name, owner="me", before=None, text="x"):
    output = [{"type": "message", "id": f"out_{name}", "role": "assistant", "content": text}]
    response = {"id": name, "output": output, "previous_response_id": before, "status": "completed"}
    return StoredResponse(owner, response, [{"role": "user", "content": name, "id": f"in_{name}"}])


def test_context_is_the_whole_conversation_in_order():
    store = MemoryStore()
    for one in (entry("a"), entry("b", before="a"), entry("c", before="b")):
        store.put(one)
    assert [item["id"] for item in store.context("c", "me")] == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]


def test_a_conversation_in_use_is_kept_as_a_whole():
    store = MemoryStore(entries=4)
    store.put(entry("a"))
    store.put(entry("b", before="a"))
    for name in "wxyz":
        store.context("b", "me")
        store.put(entry(name))
    assert store.find("a", "me")
    assert store.find("w", "me") is None
    assert len(store) == 4


def test_size_is_bounded():
    store = MemoryStore(size=5_000)
    for at in range(100):
        store.put(entry(f"r{at}", text="y" * 1_000))
    assert 1 <= len(store) <= 5
    assert store.find("r99", "me")
    assert store.find_item("out_r0", "me") is None


def test_age_is_bounded():
    store = MemoryStore(seconds=-1)
    store.put(entry("a"))
    with pytest.raises(NotFoundError):
        store.get("a", "me")


def test_owners_do_not_see_each_other():
    store = MemoryStore()
    store.put(entry("a"))
    assert store.find("a", "you") is None
    assert store.find_item("out_a", "you") is None
    assert not store.delete("a", "you")
    with pytest.raises(NotFoundError):
        store.context("a", "you")
    assert store.delete("a", "me")
    assert store.find_item("out_a", "me") is None


def test_a_second_state_of_one_response_replaces_the_first():
    store = MemoryStore()
    store.put(entry("a", text="y" * 500))
    store.put(entry("a", text="z"))
    assert len(store) == 1
    assert store.get("a", "me").response["output"][0]["content"] == "z"
