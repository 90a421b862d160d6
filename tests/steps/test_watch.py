"""Tests of the messages to subscribers of an engine.

They carry its state, and the names of the blocks in its KV cache.
"""

import struct

from hypothesis import given, settings
from hypothesis import strategies as st
from llmops_engine import engine_runtime as runtime
from llmops_engine.recent_blocks import RecentBlocks
from llmops_engine.steps import kv_event_queue as kv
from llmops_engine.steps.subscription import Subscription

from llmops.contract import KV_CLEARED, KV_REMOVED, KV_STORED
from llmops.kv_blocks import adapter_salt, block_hashes


def packed(ids) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


class Gateway:
    """The state that one gateway derives from the messages that it receives."""

    def __init__(self) -> None:
        self.names: set[int] = set()
        self.steps, self.beats, self.served = [], [], []

    def send(self, step) -> None:
        self.steps.append(step)
        at = 0
        for kind, count in step.report.kv_kinds:
            some = step.report.kv_hashes[at : at + count].tolist()
            at += count
            if kind == KV_STORED:
                self.names.update(some)
            elif kind == KV_REMOVED:
                self.names.difference_update(some)
            else:
                assert (kind, count) == (KV_CLEARED, 0)
                self.names.clear()
        if step.report.identity:
            self.served.append(step.report.identity)

    def send_heartbeat(self, state) -> None:
        self.beats.append(state)

    def finish(self, error: str = "") -> None: ...

    def is_cancelled(self) -> bool:
        return False


def watching(**options):
    """A subscription that watches, what it is told from, and who is told."""
    contents, gateway = kv.KvCacheContents(), Gateway()
    subscription = Subscription(**options)
    subscription.kv_events = kv.KvEventQueue(contents)
    subscription.attach(gateway, 0, 0.0)
    return subscription, contents, gateway


def state_of(**numbers):
    return runtime.EngineState(**{**dict.fromkeys(runtime.EngineState._fields, 0), **numbers})


def test_blocks_of_an_adapter_are_none_of_its_base_models() -> None:
    ids = packed(range(64))
    salts = [0, 1, adapter_salt(0, 1), adapter_salt(0, 2), adapter_salt(1, 1)]
    hashes = [one for salt in salts for one in block_hashes(ids, 16, salt)]
    assert len(set(hashes)) == 4 * len(salts)


@settings(max_examples=40)
@given(st.data())
def test_whoever_watches_ends_up_with_what_the_cache_has(data) -> None:
    """Changes and sends in any order, also of more names than wait for one gateway."""
    most, kv.MAX_QUEUED_HASHES = kv.MAX_QUEUED_HASHES, 8
    chunk, kv.MAX_HASHES_PER_MESSAGE = kv.MAX_HASHES_PER_MESSAGE, 5
    try:
        subscription, contents, gateway = watching()
        held, now = set[int](), 0.0
        names = st.lists(st.integers(0, 2**64 - 1), max_size=6, unique=True)
        for action in data.draw(st.lists(st.sampled_from(["store", "remove", "clear", "send"]), max_size=30)):
            changes = []
            if action == "store":
                changes = [runtime.KvCacheEvent(KV_STORED, data.draw(names))]
                held.update(changes[0].names)
            elif action == "remove" and held:
                removed = data.draw(st.lists(st.sampled_from(sorted(held)), unique=True))
                changes = [runtime.KvCacheEvent(KV_REMOVED, removed)]
                held.difference_update(changes[0].names)
            elif action == "clear":
                changes = [runtime.KvCacheEvent(KV_CLEARED)]
                held.clear()
            else:
                subscription.flush(now := now + 1.0, state_of())
                subscription.acknowledge(len(gateway.steps), now)
            contents.apply(changes)
            subscription.kv_events.add(changes)
        while subscription.kv_events:
            subscription.flush(now := now + 1.0, state_of())
            subscription.acknowledge(len(gateway.steps), now)
        assert gateway.names == held == set(contents.hashes())
        assert all(len(step.report.kv_hashes) <= 5 for step in gateway.steps)
    finally:
        kv.MAX_QUEUED_HASHES, kv.MAX_HASHES_PER_MESSAGE = most, chunk


def test_a_silent_engine_says_its_state_each_second_and_a_change_at_once() -> None:
    subscription, _, gateway = watching()
    idle, busy = state_of(), state_of(running=1)
    subscription.flush(10.0, idle)
    assert len(gateway.steps) == 1, "the first message says what the cache has"
    for now in (10.05, 10.5, 10.99):
        subscription.flush(now, idle)
    assert gateway.beats == []
    for now, state in ((11.0, idle), (11.05, busy), (11.11, busy), (11.5, busy)):
        subscription.flush(now, state)
    assert gateway.beats == [idle, busy]


def test_changes_of_the_cache_wait_for_tokens_or_a_tenth_of_a_second() -> None:
    subscription, contents, gateway = watching()
    subscription.claim(0)

    def step(now: float, name: int, tokens: bool = False) -> None:
        changes = [runtime.KvCacheEvent(KV_STORED, [name])]
        contents.apply(changes)
        subscription.kv_events.add(changes)
        if tokens:
            subscription.add(0, 0, [1], [])
        subscription.flush(now, state_of())

    subscription.flush(9.99, state_of())
    for at in range(100):
        step(10.0 + at / 50, at)
    # two seconds of 50 steps each
    assert 15 <= len(gateway.steps) - 1 <= 20
    step(12.0, 100, tokens=True)
    step(12.01, 101, tokens=True)
    assert gateway.names == set(range(102))


def test_a_state_is_not_kept_for_later_and_comes_while_the_window_is_closed() -> None:
    subscription, _, gateway = watching(window=1)
    subscription.flush(0.0, state_of())
    subscription.begin(3, 0, 64, [])
    subscription.add(3, 0, [1], [])
    subscription.flush(1.0, state_of())
    assert (len(gateway.steps), len(gateway.beats)) == (1, 1)
    subscription.acknowledge(1, 1.0)
    subscription.flush(1.0, state_of())
    assert gateway.steps[1].cached == [64]


def test_a_state_says_which_requests_of_its_own_subscription_it_counts() -> None:
    (one, _, first), (other, _, second) = watching(), watching()
    for slot in (0, 1, 1, 0):
        one.claim(slot)
    for now in (1.0, 2.0):
        for subscription in (one, other):
            subscription.flush(now, state_of(running=2))
        one.claim(7)
    assert [first.steps[0].report.state.next_slot, first.beats[0].next_slot] == [2, 8]
    assert [second.steps[0].report.state.next_slot, second.beats[0].next_slot] == [0, 0]


def test_first_entries_say_who_answers_and_how_much_of_the_prompt_was_there() -> None:
    subscription, _, gateway = watching(identity=("smollm2", "1", "abc", "f00d"))
    subscription.begin(0, 0, None, [])
    subscription.add(0, 0, [7], [])
    subscription.begin(1, 2, 32, [])
    subscription.add(1, 2, [8], [])
    subscription.flush(0.0, state_of())
    subscription.add(0, 0, [9], [])
    subscription.flush(0.0, state_of())
    first, second = gateway.steps
    assert first.entries.tolist() == [[0, 0, 1, 16], [1, 2, 1, 16]]
    assert (first.cached, second.cached) == ([-1, 32], [])
    subscription.begin(2, 0, None, [])
    subscription.add(2, 0, [9], [])
    subscription.flush(0.0, state_of())
    assert gateway.served == [("smollm2", "1", "abc", "f00d")] * 2


def test_recent_blocks_keep_the_beginning_of_a_text_longest() -> None:
    recent = RecentBlocks(3, 4)
    ids = packed(range(12))
    a, b, c = block_hashes(ids, 4)
    recent.touch(ids, 0, 0)
    assert recent.take_events() == [(KV_STORED, [a, b, c])]
    (other,) = block_hashes(packed([9, 9, 9, 9]), 4)
    recent.touch(packed([9, 9, 9, 9, 9]), 0, 0)
    assert recent.take_events() == [(KV_REMOVED, [c]), (KV_STORED, [other])]
    recent.touch(ids[:32], 0, 0)
    assert recent.take_events() == []
    recent.touch(ids[:16], 5, 0)
    assert recent.take_events() == [(KV_REMOVED, [other]), (KV_STORED, block_hashes(ids[:16], 4, 5))]
