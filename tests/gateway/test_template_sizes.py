"""What filters, methods and operators of a template are taken to make, before they make it: counted by hand.

An empty list counts 32, an element of a list 32 and its text.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext

from llmops.gateway.text import template_limits
from llmops.gateway.text.chat_template import to_json

FILTERS = {**Environment().filters, "tojson": to_json}
BOUNDED = Environment()
BOUNDED.filters.update(template_limits.bounded_filters({"tojson": to_json}))


@pytest.fixture
def asked(monkeypatch):
    """Characters that were asked for."""
    found: list[int] = []
    monkeypatch.setattr(template_limits, "check_result_size", found.append)
    return found


def filtered(name: str, value, *args, **options):
    return BOUNDED.call_filter(name, value, args, options, eval_ctx=EvalContext(BOUNDED))


@pytest.mark.parametrize(
    ("name", "args", "options", "size"),
    [
        ("center", ("x",), {}, 80),
        ("center", ("x", 200), {}, 200),
        # four spaces before each line unless told otherwise
        ("indent", ("a\nb\nc",), {}, 3 * 4),
        ("indent", ("a\nb", 7), {}, 2 * 7),
        ("indent", ("a\nb", "--->"), {}, 2 * 4),
        ("replace", ("abca", "a", "xyz"), {}, 2 * 3),
        ("join", (["a", "b", "c"], ", "), {}, 3 * 2),
        ("format", ("%s-%s", "ab", "c"), {}, 5 + 32 + (32 + 2) + (32 + 1)),
        ("format", ("%(a)s %(a)s",), {"a": "xyz"}, 11 + 2 * (32 + 32 + 1 + 32 + 3)),
        ("format", ("%9.3f", 1.5), {}, 5 + 32 + 32 + 9 + 3),
        ("sum", ([1, 2],), {}, 0),
        ("sum", ([[1], [2]],), {"start": []}, 2 * ((32 + 2 * (32 + 32)) + 32)),
        ("tojson", ("abc",), {}, 3),
        # each character may become \\uXXXX
        ("tojson", ("é" * 100,), {"ensure_ascii": True}, 600),
        ("tojson", ([1, 2],), {"separators": (", ", ": ")}, 96 + 3 * 4),
        ("tojson", ([[1], 2],), {"indent": 5}, 128 + 4 * 5 * 2),
        ("tojson", ([[1], 2],), {"indent": "--"}, 128 + 4 * 2 * 2),
    ],
)
def test_what_filters_make(asked, name, args, options, size):
    filtered(name, *args, **options)
    assert asked == [size]


@pytest.mark.parametrize(
    ("name", "args"),
    [("upper", ("ab",)), ("upper", (["ab"],)), ("length", ("ab",)), ("first", ([1, 2],))],
)
def test_filters_that_make_no_more_than_they_got_ask_for_nothing(asked, name, args):
    filtered(name, *args)
    assert asked == []


@given(st.lists(st.text('aé"\n ', max_size=20), max_size=8), st.integers(1, 9))
def test_at_least_what_is_made(texts, width):
    """Jinja's own filters say what that is."""
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_limits, "check_result_size", found.append)
        for name, args, options in (
            ("center", ("".join(texts), width), {}),
            ("indent", ("".join(texts), width, True, True), {}),
            ("tojson", (texts,), {"ensure_ascii": True, "indent": width}),
        ):
            made = FILTERS[name](*args, **options)
            filtered(name, *args, **options)
            assert found.pop() + sum(map(len, texts)) >= len(made), name


@pytest.mark.parametrize(
    ("operator", "left", "right", "sizes"),
    [
        ("%", "%s", ("abc",), [2 + 32 + 32 + 3]),
        ("%", "%5d|%-7s", (1, "x"), [8 + 32 + 32 + 32 + 1 + 5 + 7]),
        ("%", "%(x)s%(x)s", {"x": "ab"}, [10 + 2 * (32 + 32 + 1 + 32 + 2)]),
        ("*", "ab", 7, [14]),
        ("*", 7, [1, 2], [14]),
        ("*", 7, 8, []),
        ("**", 2, 10, []),
    ],
)
def test_what_operators_make(asked, operator, left, right, sizes):
    template_limits.check_operator(operator, left, right)
    assert asked == sizes


@pytest.mark.parametrize(
    ("operator", "left", "right", "problem"),
    [
        ("**", 1025, 2, "a power is too large"),
        ("**", 2, 1025, "a power is too large"),
        ("**", "2", 2, "a power is too large"),
        ("%", "%*d", (5, 1), "a width that is not in the format itself is not allowed"),
        ("%", "%.*f", (5, 1.0), "a width that is not in the format itself is not allowed"),
    ],
)
def test_operators_that_make_too_much(asked, operator, left, right, problem):
    with pytest.raises(SecurityError, match=problem):
        template_limits.check_operator(operator, left, right)


def test_powers_and_products_just_within_their_limits(asked):
    template_limits.check_operator("**", 1024, 1024)
    template_limits.check_operator("*", 2**32767, 2**32767)
    with pytest.raises(SecurityError):
        template_limits.check_operator("*", 2**32767, 2**32768)


def test_decimals_up_to_64():
    assert filtered("round", 1.5, 64) == 1.5
    for decimals in (65, -65):
        with pytest.raises(SecurityError, match="a number of decimals is too large"):
            filtered("round", 1.5, decimals)


@pytest.mark.parametrize(
    ("owner", "name", "args", "sizes"),
    [
        ("ab", "center", (9,), [2 + 9]),
        ("ab", "zfill", (9,), [2 + 9]),
        ("ab", "ljust", (9, "."), [2 + 9]),
        ("abca", "replace", ("a", "xyz"), [4 + 2 * 3]),
        ("--", "join", (["a", "b"],), [2 + (32 + 2 * 33) + 2 * 2]),
        ("ab", "upper", (), []),
        ([1], "index", (1,), []),
    ],
)
def test_what_methods_make(asked, owner, name, args, sizes):
    template_limits.check_method(owner, name, args)
    assert asked == sizes


def test_a_field_of_format_is_its_value_width_and_precision(asked):
    template_limits.check_format_field(">12.34", "abc")
    assert asked == [3 + 12 + 34]
