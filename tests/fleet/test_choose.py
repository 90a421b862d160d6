"""Tests of the replica that a request goes to."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.interfaces import ReplicaView
from llmops.gateway.routing.cost_model import ReportedSteps
from llmops.gateway.routing.placement.least_cost import LeastCostPolicy
from llmops.gateway.routing.placement.prefix_index import PrefixIndex
from tests.fleet.views import view, wanted

PROMPT = list(range(400))


def policy(seed: int = 0) -> LeastCostPolicy:
    return LeastCostPolicy(PrefixIndex(), random.Random(seed))


def test_the_holder_of_the_prefix_gets_it_until_its_queue_costs_more_than_reading_it_again() -> None:
    chosen, views = policy(), [view(name) for name in "abcd"]
    chosen.sent(wanted(PROMPT), views[2])
    # 400 tokens at 10,000/s are 40 ms
    views[2].waiting_tokens = 390
    assert chosen.choose(wanted(PROMPT), views) == 2
    # as much as elsewhere, with the last token, which is always read: the holder
    views[2].waiting_tokens = 399
    assert chosen.choose(wanted(PROMPT), views) == 2
    views[2].waiting_tokens = 410
    assert chosen.choose(wanted(PROMPT), views) != 2


def test_what_each_replica_is_thought_to_have_cached() -> None:
    chosen, views = policy(), [view(name) for name in "abc"]
    chosen.sent(wanted(PROMPT), views[0])
    chosen.sent(wanted([*PROMPT[:100], *range(900, 1000)]), views[1])
    assert [chosen.cached(wanted(PROMPT), one) for one in views] == [400, 100, 0]


def test_what_was_sent_and_is_not_seen_yet_counts_as_waiting() -> None:
    chosen, views = policy(), [view("a"), view("b", in_flight_tokens=500)]
    assert chosen.choose(wanted(PROMPT), views) == 0


def test_gateways_that_know_nothing_of_each_other_send_a_new_prefix_to_one_place() -> None:
    views = [view(f"replica-{number}") for number in range(16)]
    assert len({policy(seed).choose(wanted([*PROMPT, seed]), views) for seed in range(20)}) == 1


def test_new_prefixes_spread_over_all_replicas() -> None:
    views = [view(f"replica-{number}") for number in range(4)]
    chosen = policy()
    assert min(Counter(chosen.choose(wanted([first, *PROMPT]), views) for first in range(400)).values()) > 70


@given(st.sets(st.integers(0, 99), min_size=9, max_size=20), st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_when_a_replica_leaves_only_its_own_prefixes_move(numbers: set[int], firsts: list[int]) -> None:
    views = [view(f"replica-{number}") for number in sorted(numbers)]
    before = {first: favourite(views, first) for first in firsts}
    left = views[1:]
    for first, where in before.items():
        if where != views[0].replica_id:
            assert favourite(left, first) == where


def favourite(views: list[ReplicaView], first: int) -> str:
    """Return the replica that is chosen when all else is equal.

    The candidates are the same for every random draw.
    """
    places = {policy(seed).choose(wanted([first, *PROMPT]), views) for seed in range(5)}
    assert len(places) == 1
    return views[places.pop() or 0].replica_id


def test_a_replica_over_the_watermark_gets_nothing_while_another_is_below() -> None:
    views = [view("a", free_blocks=150), view("b", waiting_tokens=100_000)]
    chosen = policy()
    chosen.sent(wanted(PROMPT), views[0])
    assert chosen.choose(wanted(PROMPT), views) == 0
    # what is cached there needs no blocks; of what is not, 400 tokens are 100 blocks
    assert chosen.choose(wanted([9, *PROMPT]), views) == 1
    views[1].free_blocks = 0
    assert chosen.choose(wanted([9, *PROMPT]), views) == 0


@pytest.mark.parametrize("state", ["starting", "draining", "gone"])
def test_nothing_goes_where_nothing_may(state: str) -> None:
    assert policy().choose(wanted(PROMPT), [view("a", state=state)]) is None


def test_suspects_are_used_when_there_is_nothing_else() -> None:
    views = [view("a", state="suspect"), view("b", waiting_tokens=10**6)]
    assert policy().choose(wanted(PROMPT), views) == 1
    views[1].state = "gone"
    assert policy().choose(wanted(PROMPT), views) == 0


def test_adapters_and_where_it_failed_leave_replicas_out() -> None:
    views = [view("a"), view("b", adapters=frozenset({"fr"})), view("c")]
    chosen = policy()
    assert chosen.choose(wanted(PROMPT, adapter="fr"), views) == 1
    assert chosen.choose(wanted(PROMPT, adapter="de"), views) is None
    assert chosen.choose(wanted(PROMPT, without=frozenset({"a", "b"})), views) == 2


def test_with_many_replicas_a_hot_prefix_does_not_stay_on_the_first_that_have_it() -> None:
    views = [view(f"replica-{number}") for number in range(32)]
    chosen = policy()
    for one in views:
        chosen.sent(wanted(PROMPT), one)
    for one in views[:20]:
        one.running = 8
    assert all((chosen.choose(wanted(PROMPT), views) or 0) >= 20 for _ in range(20))


def test_without_an_index_the_shortest_queue_wins() -> None:
    views = [view("a", waiting_tokens=500), view("b"), view("c", waiting_tokens=500)]
    assert LeastCostPolicy(None, random.Random(1)).choose(wanted(PROMPT), views) == 1


def test_a_conversation_stays_with_its_cache_where_all_are_busy() -> None:
    """Were it moved for a shorter queue, all that wait where it goes would wait until it is read again."""
    policy = LeastCostPolicy(PrefixIndex(), random.Random(1))
    views = [view("a", running=7, waiting_tokens=1500), view("b", running=7)]
    policy.sent(wanted(PROMPT), views[0])
    assert policy.choose(wanted(PROMPT), views) == 0
    assert policy.choose(wanted(PROMPT), [view("a", running=1, waiting_tokens=1500), view("b")]) == 1


def test_a_cached_prefix_outweighs_a_fuller_batch_where_caches_are_full() -> None:
    """Reading again displaces nothing from an empty cache, and the emptier batch wins."""
    for free, expected in ((1000, 1), (300, 0)):
        views = [view("a", running=4, free_blocks=free), view("b", free_blocks=free)]
        chosen = policy()
        chosen.sent(wanted(PROMPT), views[0])
        # 40 ms of reading, or 0.6 s by which 60 steps become longer
        assert chosen.choose(wanted(PROMPT, answer=60), views) == expected, free


def test_a_long_step_is_no_mean() -> None:
    """Neither the first one, which reads a prompt, nor one that takes ten times as long as it should."""
    steps = ReportedSteps()
    steps.add(0.25, 1000)
    for _ in range(9):
        steps.add(0.03)
    assert steps.seconds == pytest.approx((0.25 + 9 * 0.03) / 10)
    for _ in range(100):
        steps.add(0.03)
    steps.add(0.3)
    assert steps.seconds == pytest.approx(0.03 + 0.1 * 0.06, rel=1e-3)
    steps.add(2.5, 1000)
    assert steps.prefill_rate > 1500
    for _ in range(40):
        steps.add(0.12)
    assert steps.seconds == pytest.approx(0.12, rel=0.1)


def test_a_cache_key_decides_among_equal_replicas_and_yields_to_a_prefix_and_a_queue() -> None:
    views = [view(name) for name in "abcd"]
    shared, own = PROMPT, [*PROMPT, *range(500, 540)]
    chosen = policy()
    for one in views:
        chosen.sent(wanted(shared), one)
    by_key = {key: {chosen.choose(wanted(own, affinity=key), views) for _ in range(5)} for key in range(20)}
    assert all(len(places) == 1 for places in by_key.values())
    assert len(set.union(*by_key.values())) > 1
    # another gateway, which knows none of the prefixes, chooses the same replicas
    assert {key: {policy().choose(wanted(own, affinity=key), views)} for key in by_key} == by_key
    place = by_key[1].pop()
    assert place is not None
    views[place].waiting_tokens = 5000
    other = chosen.choose(wanted(own, affinity=1), views)
    assert other is not None
    assert other != place
    views[place].waiting_tokens = 0
    chosen.sent(wanted(own), views[other])
    assert chosen.choose(wanted(own, affinity=1), views) == other
