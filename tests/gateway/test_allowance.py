"""Tests of the work limits of a rendering, exact to the last character."""

from __future__ import annotations

import pytest
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

from llmops.gateway.text.render_budget import (
    MAX_REPEATS,
    MAX_TOTAL_CHARACTERS,
    MAX_VALUE_CHARACTERS,
    TemplateTimeoutError,
    charge_value,
    check_result_size,
    check_time,
    checked_count,
    checked_value,
    join_texts,
    spend_characters,
    text_size,
    timed_iteration,
    within_budget,
)


def left(work) -> int:
    """Characters that `work` leaves of an allowance."""

    def measure() -> int:
        work()
        low, high = 0, MAX_TOTAL_CHARACTERS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def fits(size: int) -> bool:
        try:
            spend_characters(size)
        except SecurityError:
            return False
        finally:
            spend_characters(-size)
        return True

    return within_budget(10.0, measure)


def test_the_last_character_may_be_used():
    assert left(lambda: None) == MAX_TOTAL_CHARACTERS == 2**27
    within_budget(10.0, spend_characters, MAX_TOTAL_CHARACTERS)
    with pytest.raises(SecurityError, match="the text it produces is too long"):
        within_budget(10.0, spend_characters, MAX_TOTAL_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("value", "cost"),
    [("", 0), ("abc", 3), ([1, 2], 16), ((1, 2, 3), 24), ({"a": 1}, 0), (7, 0), (type("Text", (str,), {})("abcd"), 4)],
)
def test_texts_and_slots_are_counted(value, cost):
    assert MAX_TOTAL_CHARACTERS - left(lambda: charge_value(value)) == cost
    assert charge_value(value) is value


def test_what_is_joined_is_counted_and_refused_before_it_is_made():
    assert MAX_TOTAL_CHARACTERS - left(lambda: join_texts(["ab", "c"])) == 3
    assert join_texts(iter(["ab", "c"])) == "abc"
    within_budget(10.0, check_result_size, MAX_VALUE_CHARACTERS)
    with pytest.raises(SecurityError, match="a text or list it produces is too long"):
        within_budget(10.0, check_result_size, MAX_VALUE_CHARACTERS + 1)

    def nearly_spent() -> None:
        spend_characters(MAX_TOTAL_CHARACTERS - 2)
        check_result_size(2)
        with pytest.raises(SecurityError):
            check_result_size(3)

    within_budget(10.0, nearly_spent)


def test_an_allowance_is_one_rendering_s_and_the_outer_one_goes_on():
    assert MAX_TOTAL_CHARACTERS - left(lambda: (spend_characters(5), within_budget(10.0, spend_characters, 1000))) == 5


def test_time():
    check_time()
    assert within_budget(10.0, lambda: list(timed_iteration("ab"))) == ["a", "b"]
    with pytest.raises(TemplateTimeoutError, match="it takes too long"):
        within_budget(-1.0, check_time)
    with pytest.raises(TemplateTimeoutError):
        within_budget(-1.0, lambda: list(timed_iteration("ab")))
    check_time()


@pytest.mark.parametrize(
    ("count", "expected"),
    [(3, 3), (2.9, 2), (MAX_REPEATS, MAX_REPEATS), (-MAX_REPEATS, -MAX_REPEATS), ("3", 0), (None, 0)],
)
def test_a_count(count, expected):
    assert checked_count(count) == expected


@pytest.mark.parametrize("count", [MAX_REPEATS + 1, -MAX_REPEATS - 1, float(MAX_REPEATS + 1)])
def test_a_count_that_is_too_large(count):
    with pytest.raises(SecurityError, match="a width or count is too large"):
        checked_count(count)


KNOWN = [1, 2]


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("abc", 3),
        (7, 32 + 3 // 3),
        (None, 32),
        (2**30, 32 + 31 // 3),
        ([], 32),
        (["abc"], 32 + 32 + 3),
        ({"ab": 1}, 32 + 32 + 2 + 32),
        ({"ab": 1}.items(), 32 + 32 + 2 + 32),
        ({"ab": 1}.keys(), 32 + 32 + 2),
        ({"ab": 1}.values(), 32 + 32),
        ({"ab"}, 32 + 32 + 2),
        (Namespace(a="b"), 32 + 32 + 32 + 1 + 32 + 1),
        # as often as it would be written
        ([KNOWN, KNOWN], 32 + 2 * (32 + 2 * 32)),
    ],
)
def test_the_size_of_what_becomes_text(value, size):
    assert text_size(value) == size
    assert checked_value(value) is value


class Unread(str):
    def __len__(self) -> int:
        raise AssertionError("it was looked at")


def test_one_value_has_two_to_the_25_characters_and_longer_lists_are_not_even_read():
    assert MAX_VALUE_CHARACTERS == 33_554_432
    with pytest.raises(SecurityError, match="a text or list it produces is too long"):
        checked_value([Unread()] * (2**20 + 1))


def test_what_holds_itself_or_too_much_is_refused():
    endless: list = []
    endless.append(endless)
    doubled: list = [1]
    for _ in range(30):
        doubled = [doubled, doubled]
    for value in (endless, doubled, [0] * (MAX_VALUE_CHARACTERS // 32 + 1), [10**300] * (MAX_VALUE_CHARACTERS // 32)):
        with pytest.raises(SecurityError, match="a text or list it produces is too long"):
            checked_value(value)
