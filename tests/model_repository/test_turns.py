"""The queues of the engine's grammars and of the gateway's texts: whoever brings many waits for them alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.round_robin import RoundRobinQueue

NAMES = st.sampled_from(["a", "b", "a/x", "a/y", "c/x"])


@given(st.lists(NAMES, max_size=30))
def test_all_that_came_is_taken_once_and_each_s_own_in_order(names: list[str]) -> None:
    turns = RoundRobinQueue()
    for at, name in enumerate(names):
        turns.put(name.split("/"), (name, at))
    assert turns.size == len(names)
    assert turns.waiting("a") == sum(name.split("/")[0] == "a" for name in names)
    taken = [turns.take() for _ in names]
    assert Counter(taken) == Counter((name, at) for at, name in enumerate(names))
    for name in set(names):
        assert [at for one, at in taken if one == name] == [at for at, one in enumerate(names) if one == name]
    with pytest.raises(IndexError):
        turns.take()


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 3))
def test_who_comes_later_waits_for_one_of_each_other(many: int, taken: int, others: int) -> None:
    turns = RoundRobinQueue()
    for other in range(others):
        for _ in range(many):
            turns.put([f"heavy{other}"], "heavy")
    for _ in range(min(taken, many * others)):
        turns.take()
    turns.put(["light"], "light")
    assert "light" in [turns.take() for _ in range(min(others + 1, turns.size))]


def test_many_names_of_one_do_not_make_it_more() -> None:
    turns = RoundRobinQueue()
    for at in range(40):
        turns.put(["a", f"key{at}"], "heavy")
    turns.put(["b"], "light")
    assert "light" in [turns.take(), turns.take()]


def order(*paths: str) -> list[str]:
    """Return the order of requests that all wait, by the names of their callers."""
    turns: RoundRobinQueue[str] = RoundRobinQueue()
    for path in paths:
        turns.put(path.split("/"), path)
    return [turns.take() for _ in paths]


def test_one_of_each_in_turn_and_the_first_first() -> None:
    assert order("a", "a", "a", "b", "c", "b") == ["a", "b", "c", "a", "b", "a"]


def test_who_has_more_names_takes_turns_within_the_turns_of_the_first() -> None:
    assert order("a/x", "a/x", "a/y", "b", "b", "b") == ["a/x", "b", "a/y", "b", "a/x", "b"]


def test_what_is_a_name_s_own_goes_before_what_others_ask_under_it() -> None:
    assert order("a/x", "a", "b", "a") == ["a", "b", "a", "a/x"]


def test_how_many_wait() -> None:
    turns: RoundRobinQueue[int] = RoundRobinQueue()
    for number in range(3):
        turns.put(["a", "x"], number)
    turns.put([], 3)
    assert (turns.size, turns.waiting("a"), turns.waiting("b")) == (4, 3, 0)
    assert turns.take() == 3
    assert turns.take() == 0
    assert (turns.size, turns.waiting("a")) == (2, 2)
    assert [turns.take(), turns.take()] == [1, 2]
    assert (turns.size, turns.waiting("a")) == (0, 0)
