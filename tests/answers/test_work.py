"""Tests of how much work a grammar may take, and which grammars are cached.

Work is exact to the step, the cache to the character.
"""

from __future__ import annotations

import itertools
import math

import pytest

from llmops.gateway.generation.structured.grammar import (
    NotEnforceableError,
    compile_limits,
    grammar_cache,
    json_schema_grammar,
    regex_grammar,
)
from llmops.gateway.generation.structured.grammar.compile_limits import GrammarTooComplexError
from llmops.gateway.text.text_thread_pool import CpuLimitError


def refused_at(*bounds: float) -> int:
    """Return the number of the first step that is rejected."""
    with compile_limits.step_budget(*bounds):
        for step in itertools.count(1):
            try:
                compile_limits.spend_steps()
            except GrammarTooComplexError:
                return step
    raise AssertionError


@pytest.mark.parametrize(("steps", "at"), [(0, 4097), (4096, 4097), (4097, 8194), (8193, 8194), (8194, 12291)])
def test_steps_are_looked_at_each_4097th(steps, at):
    assert refused_at(steps, 1e9) == at


@pytest.mark.parametrize(("look", "seconds", "looks"), [(0.4, 1.0, 3), (0.5, 1.0, 3), (20.0, 1.0, 3), (0.5, 0.0, 1)])
def test_a_look_counts_its_time_up_to_half_a_second(monkeypatch, look, seconds, looks):
    moments = itertools.count(100.0, look)
    monkeypatch.setattr(compile_limits, "thread_time", lambda: next(moments))
    assert refused_at(10**9, seconds) == looks * 4097


def test_without_a_bound_on_time_it_is_five_seconds(monkeypatch):
    moments = itertools.count(0.0, 0.5)
    monkeypatch.setattr(compile_limits, "thread_time", lambda: next(moments))
    assert refused_at(10**9) == 11 * 4097


def test_what_is_counted_within_is_not_counted_outside():
    compile_limits.spend_steps(10**12)
    with compile_limits.step_budget(10**6) as outer:
        compile_limits.spend_steps(3)
        with compile_limits.step_budget(10**6) as inner:
            compile_limits.spend_steps(7)
            assert inner() == 7
        assert outer() == 3


# -- what is remembered ------------------------------------------------------------------------------------------------

ROOM = 2 * (200 + 1 + 10)


def key(name: str) -> tuple[str, str, bool]:
    return ("schema", name, True)


def kept(memory: grammar_cache.GrammarCache) -> str:
    return "".join(name for name in "abcd" if memory.get(key(name)) is not None)


@pytest.mark.parametrize(
    ("asked", "left"), [("ab", "ab"), ("abc", "bc"), ("aba", "ab"), ("aba?c", "ac"), ("aab", "ab"), ("abca?d", "cd")]
)
def test_of_what_does_not_fit_the_longest_unasked_goes(asked, left):
    """`a` is put in, `a?` only asked for."""
    memory = grammar_cache.GrammarCache(ROOM)
    for name, following in itertools.pairwise(asked + " "):
        if following == "?":
            memory.get(key(name))
        elif name != "?":
            memory.put(key(name), "x" * 10)
    assert kept(memory) == left


def test_what_is_longer_than_all_of_it_leaves_room_for_others():
    memory = grammar_cache.GrammarCache(ROOM)
    memory.put(key("a"), "x" * (ROOM - 200))
    assert kept(memory) == ""
    for name, length in (("b", 10), ("c", 11), ("d", 9)):
        memory.put(key(name), NotEnforceableError("x" * length))
    assert kept(memory) == "cd"


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(grammar_cache, "_cache", grammar_cache.GrammarCache(10**6))


def test_each_grammar_is_made_once(memory, monkeypatch):
    made = {strict: json_schema_grammar('{"oneOf":[{"type":"integer"},{}]}', strict) for strict in (False,)}
    assert regex_grammar("true") != json_schema_grammar("true", True)
    assert regex_grammar("^a") == regex_grammar("a")
    with pytest.raises(NotEnforceableError, match="oneOf"):
        json_schema_grammar('{"oneOf":[{"type":"integer"},{}]}', True)
    monkeypatch.setattr(grammar_cache, "SchemaCompiler", None)
    assert json_schema_grammar('{"oneOf":[{"type":"integer"},{}]}', False) == made[False]
    with pytest.raises(NotEnforceableError, match="oneOf"):
        json_schema_grammar('{"oneOf":[{"type":"integer"},{}]}', True)


def making(steps: int) -> str:
    def make() -> str:
        for _ in range(steps):
            compile_limits.spend_steps()
        return "made"

    return grammar_cache._cached(("schema", str(steps), True), make)


def test_what_is_brief_may_take_less(memory, monkeypatch):
    monkeypatch.setattr(grammar_cache, "MAX_STEPS", 3 * 4097)
    monkeypatch.setattr(grammar_cache, "SHORT_LANE_STEPS", 4097)
    monkeypatch.setattr(grammar_cache, "thread_cpu_limit", lambda: 0.25)
    assert making(8193) == "made"
    with pytest.raises(CpuLimitError):
        making(8194)
    monkeypatch.setattr(grammar_cache, "thread_cpu_limit", lambda: math.inf)
    assert making(8194) == "made"
    with pytest.raises(NotEnforceableError, match="too complex"):
        making(4 * 4097)


def test_what_is_brief_takes_a_quarter_of_a_second(memory, monkeypatch):
    moments = itertools.count(0.0, 0.125)
    monkeypatch.setattr(compile_limits, "thread_time", lambda: next(moments))
    monkeypatch.setattr(grammar_cache, "thread_cpu_limit", lambda: 0.25)
    assert making(2 * 4097) == "made"
    with pytest.raises(CpuLimitError):
        making(3 * 4097)


@pytest.mark.parametrize("brief", [4097, 10**6])
def test_what_has_as_much_as_there_is_need_not_be_tried_again(memory, monkeypatch, brief):
    monkeypatch.setattr(grammar_cache, "MAX_STEPS", 4097)
    monkeypatch.setattr(grammar_cache, "SHORT_LANE_STEPS", brief)
    monkeypatch.setattr(grammar_cache, "thread_cpu_limit", lambda: 0.25)
    with pytest.raises(NotEnforceableError, match="too complex"):
        making(8194)


def test_what_is_nested_beyond_the_interpreters_stack_is_refused(memory):
    def endless() -> str:
        return endless()

    with pytest.raises(NotEnforceableError, match="nested too deeply"):
        grammar_cache._cached(key("endless"), endless)
