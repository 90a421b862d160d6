"""The queues of the engine's grammars and of the gateway's texts: whoever brings many waits for them alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.turns import Turns

NAMES = st.sampled_from(["a", "b", "a/x", "a/y", "c/x"])


@given(st.lists(NAMES, max_size=30))
def test_all_that_came_is_taken_once_and_each_s_own_in_order(names: list[str]) -> None:
    turns = Turns()
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
    turns = Turns()
    for other in range(others):
        for _ in range(many):
            turns.put([f"heavy{other}"], "heavy")
    for _ in range(min(taken, many * others)):
        turns.take()
    turns.put(["light"], "light")
    assert "light" in [turns.take() for _ in range(min(others + 1, turns.size))]


def test_many_names_of_one_do_not_make_it_more() -> None:
    turns = Turns()
    for at in range(40):
        turns.put(["a", f"key{at}"], "heavy")
    turns.put(["b"], "light")
    assert "light" in [turns.take(), turns.take()]
