"""Tests of the texts that the grammars of whole schemas accept.

A second reader of the grammar notation, which shares no code with the gateway, is compared with
jsonschema.
"""

import ast
import itertools
import json
import re
from functools import cache

import jsonschema
import pytest

from llmops.gateway.generation.structured.grammar import json_schema_grammar, regex_grammar

_ITEM = re.compile(r'("(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\w+)(\{\d+(?:,\d*)?\}|[*+?])?\s*(\|?)\s*')


class Reader:
    """Follows a grammar of literals, classes, rules and quantifiers through a text, in all ways at once."""

    def __init__(self, grammar: str) -> None:
        lines = (line.split(" ::= ", 1) for line in grammar.strip().splitlines())
        self._rules = {name: self._alternatives(body) for name, body in lines}

    def reads(self, text: str) -> bool:
        @cache
        def ends(rule: str, at: int) -> frozenset[int]:
            found: set[int] = set()
            for alternative in self._rules[rule]:
                places = {at}
                for item, least, most in alternative:
                    places = repeated(item, places, least, most)
                found |= places
            return frozenset(found)

        def after(item: str, at: int) -> frozenset[int]:
            if item[0] == '"':
                literal = ast.literal_eval(item)
                return frozenset([at + len(literal)] if text.startswith(literal, at) else [])
            if item[0] == "[":
                return frozenset([at + 1] if re.compile(item).match(text, at) else [])
            return ends(item, at)

        def repeated(item: str, places: set[int], least: int, most: int) -> set[int]:
            found = set(places) if least == 0 else set()
            for count in range(1, most + 1):
                places = {end for at in places for end in after(item, at)}
                if not places or (count > least and places <= found):
                    break
                found |= places if count >= least else set()
            return found

        return len(text) in ends("root", 0)

    @staticmethod
    def _alternatives(body: str) -> list[list[tuple[str, int, int]]]:
        found: list[list[tuple[str, int, int]]] = [[]]
        at = 0
        while at < len(body):
            match = _ITEM.match(body, at)
            assert match, f"{body[at:]!r} is not of this notation"
            item, quantifier, more = match.groups()
            least, most = {None: (1, 1), "*": (0, 999), "+": (1, 999), "?": (0, 1)}.get(quantifier, (0, 0))
            if quantifier and quantifier[0] == "{":
                low, _, high = quantifier[1:-1].partition(",")
                least, most = int(low), int(high) if high else 999 if "," in quantifier else int(low)
            found[-1].append((item, least, most))
            found += [[]] if more else []
            at = match.end()
        return found


def objects(**fields):
    return {"type": "object", "properties": fields, "additionalProperties": False}


VALUES = [
    "é", None, True, False, 0, 1, -1, 2, 3, 5, 7, 10, 1.5, -0.5, 100, "", "a", "ab", "abc", "b1", "2026-11-22",
    'q"', "1",
    [], [1], [1, 2], [1, 2, 3], ["a"], ["a", 1], [True], [[]], [[1]], [None], [1, "a", True],
    {}, {"a": 1}, {"a": "x"}, {"b": 2}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": None},
    {"a": {"a": 1}}, {"kind": "x", "a": 1}, {"kind": "y", "b": 2}, {"kind": "y", "a": 1}, {"x1": 1}, {"x1": 1, "x2": 2},
]  # fmt: skip
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
SCHEMAS = {
    "types": {"type": ["integer", "null", "boolean"]},
    "a number": {"type": "number", "minimum": 0, "exclusiveMaximum": 3},
    "multiples": {"type": "integer", "multipleOf": 5},
    "enum": {"enum": [1, "a", None, [1]]},
    "enum with a type": {"type": ["integer", "null"], "enum": [1, 1.5, "1", None]},
    "enum of numbers": {"type": "number", "enum": [1, 1.5, "1"]},
    "enum within bounds": {"enum": [1, 5, 7], "minimum": 2, "maximum": 5},
    "enum of multiples": {"enum": [1, 5, 7, 10], "multipleOf": 5},
    "enum of lengths": {"enum": ["a", "ab", "abc"], "minLength": 2, "maxLength": 2},
    "const": {"const": "ab"},
    "lengths": {"type": "string", "minLength": 1, "maxLength": 2},
    "pattern": {"type": "string", "pattern": "^[a-c]+$"},
    "format": {"type": "string", "format": "date"},
    "items": {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
    "prefix items": {"type": "array", "prefixItems": [INTEGER, TEXT], "items": False},
    "prefix items and more": {"type": "array", "prefixItems": [INTEGER], "items": TEXT, "minItems": 1},
    "lists in lists": {"type": "array", "items": {"type": "array", "items": INTEGER, "maxItems": 1}, "maxItems": 1},
    "object": {**objects(a=INTEGER, b=INTEGER), "required": ["a"]},
    "other values": {"type": "object", "additionalProperties": INTEGER},
    "any of": {"anyOf": [INTEGER, {"type": "string", "maxLength": 1}, objects(a=INTEGER)]},
    "any of beside": {"type": "integer", "anyOf": [{"maximum": 0}, {"minimum": 5}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 5}]},
    "all of objects": {
        "allOf": [{**objects(a=INTEGER, b=True), "required": ["a"]}, objects(a={"minimum": 1}, b=INTEGER)]
    },
    "all of that leave other names open": {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": INTEGER},
            {"type": "object", "properties": {"b": {"minimum": 2}}, "additionalProperties": {"maximum": 1}},
        ]
    },
    "all of that close other names": {
        "allOf": [objects(a=INTEGER), {"type": "object", "properties": {"a": True, "b": INTEGER}}]
    },
    "all of lists": {
        "allOf": [{"type": "array", "items": INTEGER, "minItems": 1}, {"items": {"maximum": 1}, "maxItems": 2}]
    },
    "all of lengths": {
        "allOf": [{"type": "string", "minLength": 1}, {"maxLength": 2}, {"maxLength": 3, "minLength": 2}]
    },
    "all of enums": {"allOf": [{"enum": [1, 2, "a"]}, {"enum": [2, "a", 3]}, {"type": "integer"}]},
    "reference beside": {"$ref": "#/$defs/n", "minimum": 2, "$defs": {"n": {"type": "integer", "maximum": 5}}},
    "one of": {
        "oneOf": [
            {**objects(kind={"const": "x"}, a=INTEGER), "required": ["kind", "a"]},
            {**objects(kind={"const": "y"}, b=INTEGER), "required": ["kind", "b"]},
        ]
    },
    "reference": {"$ref": "#/$defs/node", "$defs": {"node": objects(a={"anyOf": [INTEGER, {"$ref": "#/$defs/node"}]})}},
}
# valid, and not written: properties come in the schema's order, and texts with a maxLength have no escapes
UNWRITTEN = {'{"b": 2, "a": 1}', '"q\\""'}


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_valid_and_only_that_is_let_through(name):
    schema = SCHEMAS[name]
    reader = Reader(json_schema_grammar(json.dumps(schema), True))
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    wrong = []
    for value in VALUES:
        text = json.dumps(value, ensure_ascii=False)
        if reader.reads(text) != judge.is_valid(value) and text not in UNWRITTEN:
            wrong.append(text)
    assert wrong == []


@pytest.mark.parametrize(("separator", "colon"), [*itertools.product((",", ", ", ",  "), (":", ": ", ":  "))])
def test_at_most_one_space_stands_where_one_may(separator, colon):
    reader = Reader(json_schema_grammar(json.dumps({**objects(a=INTEGER, b=INTEGER), "required": ["a", "b"]}), True))
    text = json.dumps({"a": 1, "b": 2}, separators=(separator, colon))
    assert reader.reads(text) == ("  " not in text)


def test_what_is_no_json_is_not_let_through():
    reader = Reader(json_schema_grammar(json.dumps(objects(a=INTEGER)), True))
    texts = ("{", '{"a"', '{"a":1', '{"a":1,}', '{"a":1}}', "{a:1}", "{'a':1}", '{"a":01}', '{"a":1.0}', '{"a":1}')
    assert [text for text in texts if reader.reads(text)] == ['{"a":1}']


LENGTHS = (
    *range(4), 31, 32, 33, 63, 64, 65, 127, 128, 129, 199, 200, 201, 255, 256, 257, 511, 512, 513, 699, 700, 701,
)  # fmt: skip


@pytest.mark.parametrize("bounds", [(0, None), (2, None), (129, None), (0, 64), (0, 700), (3, 700), (200, 700)])
def test_texts_of_all_lengths_within_bounds(bounds):
    least, most = bounds
    schema = {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})
    reader = Reader(json_schema_grammar(json.dumps(schema), True))
    # without an end the reader goes a step deeper for each character
    sizes = [size for size in LENGTHS if most is not None or size <= 130]
    right = [size for size in sizes if least <= size <= (most or 130)]
    assert [size for size in sizes if reader.reads(f'"{"a" * size}"')] == right


# -- how it is written -------------------------------------------------------------------------------------------------

CLASSES = [
    "a-c", "a-cx", "^a", "^a-c", r"^\x00", r"^\x01-\x1f\"\\", r"\x00-\x1f", "é", "a-é", "é-ü", "^é", r"-\]\\", 
    "0-9a-fA-F", r"\x7f-\x80", "\U0000ffff-\U00010000", "\U00010000-\U0010ffff", "^\U0010ffff", r"\d_", r"^\w",
]  # fmt: skip
CODES = [*range(1, 0x102), 0xD7FF, 0xE000, 0xFFFE, 0xFFFF, 0x10000, 0x10001, 0x10FFFE, 0x10FFFF]
# a letter or digit behind an escape may be taken for one more of its digits
PLAIN, ESCAPED = r"(?:[0-9A-Za-z](?:-[0-9A-Za-z])?)+", r"(?:\\u[0-9a-f]{4}|\\U[0-9a-f]{8}|-)+"


@pytest.mark.parametrize("one", CLASSES)
def test_the_characters_of_a_class(one):
    grammar = regex_grammar(f"[{one}]")
    reader, judge = Reader(grammar), re.compile(f"[{one}]", re.ASCII)
    assert [code for code in CODES if reader.reads(chr(code)) != bool(judge.fullmatch(chr(code)))] == []
    assert all(re.fullmatch(f"{PLAIN}|{ESCAPED}", inside) for inside in re.findall(r"\[\^?(.*?)\]", grammar))
