"""Schemas, patterns and choices as grammars: what they let through, and what they refuse by name."""

import itertools
import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.structured.grammar import (
    NotEnforceableError,
    choice_grammar,
    compile_limits,
    grammar_cache,
    json_schema_grammar,
    regex_grammar,
)
from llmops.gateway.generation.structured.grammar.compile_limits import GrammarTooComplexError
from llmops.gateway.generation.structured.grammar.number_rules import NumberRange, integer_language, number_language
from llmops.gateway.generation.structured.grammar.regex_parser import raw_character, regex_language
from llmops.gateway.generation.structured.grammar.regular_language import any_word
from llmops.gateway.generation.structured.grammar.string_rules import json_character, quoted
from llmops.gateway.generation.structured.request_guide import compile_guide
from llmops.gateway.interfaces import Guide
from tests.support.regular_languages import contains

LIMITS = st.decimals(-5000, 5000, places=3) | st.integers(-300, 300).map(Decimal) | st.none()
BOUNDS = st.builds(NumberRange, LIMITS, LIMITS, st.booleans(), st.booleans())


def near(bounds: NumberRange):
    """Texts of numbers at the bounds, just inside and just outside, and elsewhere."""
    edges = [edge for edge in (bounds.low, bounds.high, Decimal(0)) if edge is not None]
    steps = [Decimal(sign).scaleb(-place) for place in (-2, -1, 0, 1, 3, 6) for sign in (0, 1, -1)]
    texts = [f"{edge + step:f}" for edge in edges for step in steps]
    return st.sampled_from(sorted(set(texts))) | st.decimals(-9999, 9999, places=2).map(lambda one: f"{one:f}")


@given(st.data(), BOUNDS)
def test_a_number_is_let_through_exactly_if_it_is_within_its_bounds(data, bounds):
    text = data.draw(near(bounds))
    is_right = bounds.within(Decimal(text)) and text not in ("-0", "-0.0", "-0.000", "-0.000000")
    assert contains(number_language(bounds), text) == is_right
    whole = text.partition(".")[0]
    if whole != "-0":
        assert contains(integer_language(bounds), whole) == bounds.within(Decimal(whole))


def test_multiples_are_written_out_up_to_a_thousand():
    step, high = Decimal("2.5"), Decimal(2500)
    assert contains(number_language(NumberRange(Decimal(0), high), step), "2497.5")
    with pytest.raises(NotEnforceableError, match="multipleOf"):
        number_language(NumberRange(Decimal(0), high + step), step)
    with pytest.raises(NotEnforceableError, match="multipleOf"):
        number_language(NumberRange(Decimal(0), Decimal("0.6003")), Decimal("0.0006"))


@given(st.integers(1, 1000), st.integers(-(10**6), 10**6), BOUNDS)
def test_integers_that_are_multiples(step, value, bounds):
    language = integer_language(bounds, Decimal(step))
    assert contains(language, str(value)) == (bounds.within(Decimal(value)) and value % step == 0)


@pytest.mark.parametrize(
    ("step", "bounds", "inside", "outside"),
    [
        ("0.01", NumberRange(Decimal(0)), ["0", "12.3", "0.07", "1.10"], ["0.001", "-1", "1.234"]),
        ("0.25", NumberRange(Decimal(-1), Decimal(1)), ["-0.75", "0", "1"], ["0.3", "1.25", "-1.25"]),
        ("2.5", NumberRange(Decimal(0), Decimal(10), open_high=True), ["0", "2.5", "7.5"], ["10", "5.5"]),
    ],
)
def test_numbers_that_are_multiples(step, bounds, inside, outside):
    language = number_language(bounds, Decimal(step))
    assert [text for text in inside + outside if contains(language, text)] == inside


@pytest.mark.parametrize("pattern", ["abc", "^abc", "abc$", "^abc$"])
def test_anchors_of_a_guided_regex_change_nothing(pattern):
    language = regex_language(pattern, raw_character, whole=True)
    assert [text for text in ("abc", "abcd", "xabc", "ab") if contains(language, text)] == ["abc"]


@given(st.text(max_size=8))
def test_what_a_class_lets_through_is_a_json_string(text):
    form = json.dumps(text, ensure_ascii=False)
    plain = all(ord(one) >= 0x20 or one in "\b\t\n\f\r" for one in text)
    content = quoted(regex_language(r"^[\s\S]*$", json_character))
    assert contains(content, form) == plain
    assert not contains(content, f'"{text}"') or json.loads(f'"{text}"') is not None


@pytest.mark.parametrize("code", [0xD800, 0xDBFF, 0xDC00, 0xDFFF])
def test_half_of_a_surrogate_pair_cannot_be_written(code):
    with pytest.raises(NotEnforceableError, match="half of a surrogate pair"):
        json_schema_grammar(json.dumps({"const": f"a{chr(code)}"}), True)
    assert json_schema_grammar(json.dumps({"const": chr(0xE000)}), True)


def test_a_control_character_without_a_short_escape_is_written_by_its_number():
    language = quoted(regex_language(r"^\x01$", json_character))
    assert not contains(quoted(regex_language(r"^[\x01-\x02]$", json_character)), '"\\u0001"'), "left out of sets"
    assert [text for text in ('"\x01"', '"\\u0001"', '"\\u0002"', '"1"') if contains(language, text)] == ['"\\u0001"']


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' cannot be enforced; leave it out at '#'"),
        ({"items": {"type": "array", "contains": {}}}, "'contains' cannot be enforced; leave it out at '#/items'"),
        ({"not": {"type": "null"}}, "'not' cannot be enforced"),
        ({"if": OBJECT, "then": OBJECT}, "'if' cannot be enforced"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired' cannot be enforced"),
        ({"type": "object", "minProperties": 2}, "'minProperties' cannot be enforced"),
        ({"type": "number", "multipleOf": 0.3}, "'multipleOf' 0.3 needs bounds"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf' whose parts may be valid at the same time"),
        ({"type": "string", "pattern": r"^(a\b)$"}, "'pattern'"),
        ({"type": "integer", "minimum": 1, "exclusiveMaximum": 1}, "it allows no value"),
        ({**OBJECT, "properties": {"a": {"enum": [1], "type": "string"}}, "required": ["a"]}, "no value of 'enum'"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "the combined schemas allow no value"),
        ({**OBJECT, "required": ["b"]}, "'false' allows nothing at '#/properties/b'"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"}, "only leads back"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}, "two values of 'pattern'"),
    ],
)
def test_what_cannot_be_enforced_is_named_with_its_place(schema, says):
    with pytest.raises(NotEnforceableError) as refused:
        json_schema_grammar(json.dumps(schema), True)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.3}}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "object", "properties": {"a": {"type": "string"}}, "if": OBJECT, "then": OBJECT},
        {"type": "object", "properties": {"a": {"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}}},
        {"type": "object", "patternProperties": {"^x": {}}, "required": ["xa"], "additionalProperties": False},
        {"allOf": [{**OBJECT, "patternProperties": {"^x": {}}}, {"properties": {"xa": {}}, "required": ["xa"]}]},
    ],
)
def test_without_strict_it_is_left_out(schema):
    assert json_schema_grammar(json.dumps(schema), False)


def test_an_engine_without_grammars_gets_the_schema_itself():
    guide = Guide("json_schema", '{"type":"number","maximum":1}')
    assert compile_guide(guide, ["json_schema"], True, "p") == guide
    assert compile_guide(guide, ["json_schema", "ebnf_grammar"], True, "p").kind == "ebnf_grammar"
    with pytest.raises(InvalidRequestError) as refused:
        compile_guide(Guide("json_schema", '{"not":{}}'), ["ebnf_grammar"], True, "response_format")
    assert refused.value.param == "response_format"
    assert "'not'" in refused.value.message


def test_an_object_with_no_properties_declared_is_empty_and_one_that_declares_nothing_is_free():
    assert "any_value" not in json_schema_grammar('{"type":"object","properties":{}}', True)
    assert "any_value" in json_schema_grammar('{"type":"object"}', True)


@given(st.lists(st.text("abc", max_size=6), min_size=1), st.text("abc", max_size=6))
def test_words_are_exactly_the_given_ones(texts, other):
    assert all(contains(any_word(texts), text) for text in texts)
    assert contains(any_word(texts), other) == (other in texts)


def test_a_grammar_that_takes_too_much_work_is_refused_and_not_tried_again(monkeypatch):
    pattern = "((a{0,30}){0,30}){0,30}"
    monkeypatch.setattr(grammar_cache, "MAX_STEPS", 1000)
    with pytest.raises(NotEnforceableError, match="it is too complex"):
        regex_grammar(pattern)
    monkeypatch.setattr(grammar_cache, "MAX_STEPS", 10**9)
    with pytest.raises(NotEnforceableError, match="it is too complex"):
        regex_grammar(pattern)


@pytest.mark.parametrize(("waits", "refused"), [([0.0, 20.0], False), ([0.0, *[0.4] * 20], True)])
def test_a_machine_that_stands_still_is_no_costly_grammar(monkeypatch, waits, refused):
    """The clock is for steps that are slower than they count, each of them."""
    moments = itertools.chain(itertools.accumulate(waits), itertools.repeat(sum(waits)))
    monkeypatch.setattr(compile_limits, "thread_time", lambda: next(moments))
    try:
        with compile_limits.step_budget(10**6, seconds=5.0):
            for _ in range(10**5):
                compile_limits.spend_steps(4)
        assert not refused
    except GrammarTooComplexError:
        assert refused


def test_an_enum_that_is_nested_beyond_the_interpreters_stack_is_refused():
    with pytest.raises(NotEnforceableError, match="nested too deeply"):
        choice_grammar(tuple("a" * length for length in range(1, 1024)))
