"""Tests of the parts of a `oneOf` that a grammar takes to exclude each other.

The library jsonschema confirms that they do.
"""

import itertools
import json

import jsonschema
import pytest

from llmops.gateway.generation.structured.grammar import NotEnforceableError, json_schema_grammar

INTEGER, TEXT, TRUE = {"type": "integer"}, {"type": "string"}, True


def objects(*required, closed=True, **fields):
    found = {"type": "object", "properties": fields, "required": list(required)}
    return {**found, "additionalProperties": False} if closed else found


def kind(*names, **others):
    return objects("kind", closed=False, kind={"enum": list(names)}, **others)


APART = {
    "types": [INTEGER, TEXT, {"type": "null"}],
    "several types": [{"type": ["integer", "null"]}, {"type": ["string", "boolean"]}],
    "values": [{"enum": [1, 2, "a"]}, {"enum": [3, "1"]}, {"const": None}],
    "values and types": [{"enum": [1, "a"]}, {"type": ["boolean", "null"]}],
    "alternatives": [{"anyOf": [INTEGER, {"type": "null"}]}, {"anyOf": [TEXT, {"type": "boolean"}]}],
    "the first needs more": [objects("a", a=INTEGER), objects(b=INTEGER)],
    "the second needs more": [objects(b=INTEGER), objects("b", "a", a=INTEGER, b=INTEGER)],
    "needs more than an open one": [objects("a", closed=False, a=INTEGER), objects(b=INTEGER)],
    "a property of other values": [kind("x", a=INTEGER), kind("y", "z", a=INTEGER)],
    "a property that only one needs": [kind("x"), objects(closed=False, kind={"const": "y"})],
    "one of several properties": [
        objects("a", "kind", closed=False, a=INTEGER, kind={"const": "x"}),
        objects("kind", "a", closed=False, a=INTEGER, kind={"const": "y"}),
    ],
    "alternatives of a property": [
        objects("kind", closed=False, kind={"anyOf": [{"const": "x"}, {"const": "y"}]}), kind("z"),
    ],
}  # fmt: skip
TOGETHER = {
    "the same": [TEXT, TEXT],
    "numbers": [INTEGER, {"type": "number"}],
    "the first and the third": [INTEGER, TEXT, {"type": ["null", "integer"]}],
    "the second and the third": [INTEGER, TEXT, {"type": ["null", "string"]}],
    "anything": [{}, INTEGER],
    "values": [{"enum": [1, 2]}, {"enum": [2.0, 3]}],
    "values within values": [{"const": [1]}, {"const": [1.0]}],
    "a value and its type": [{"enum": [1, "a"]}, TEXT],
    "alternatives": [{"anyOf": [INTEGER, TEXT]}, {"anyOf": [{"type": "null"}, TEXT]}],
    "lists": [{"type": "array", "items": INTEGER}, {"type": "array", "items": TEXT}],
    "neither needs more": [objects(a=INTEGER), objects(b=INTEGER)],
    "what is needed may be there": [objects("a", a=INTEGER, b=INTEGER), objects(a=INTEGER)],
    "others may be there": [objects("a", a=INTEGER), objects(closed=False, b=INTEGER)],
    "a property of one value in common": [kind("x", "y"), kind("y", "z")],
    "a property that neither needs": [objects(closed=False, kind={"const": one}) for one in "xy"],
    "a property that one does not declare": [kind("x"), objects("kind", closed=False)],
    "a property that may be any text": [kind("x"), objects("kind", closed=False, kind=TEXT)],
    "alternatives of a property": [
        objects("kind", closed=False, kind={"anyOf": [{"const": "x"}, TEXT]}), kind("z"),
    ],
    "an object and a list": [objects(a=INTEGER), {"type": ["array", "object"]}],
}  # fmt: skip
VALUES = [
    None, True, 0, 1, 2, 3, 1.5, "", "a", "1", [], [1], ["a"], {},
    *({name: value for name, value in zip(names, values, strict=True) if value is not None}
      for names in (("a", "b"), ("kind", "a"), ("x1", "kind"))
      for values in itertools.product((None, 1, "x", "y", "z"), repeat=2)),
]  # fmt: skip


def both_ways(parts):
    return [{"oneOf": parts}, {"oneOf": parts[::-1]}]


def twice_valid(parts):
    judges = [jsonschema.Draft202012Validator(part) for part in parts]
    return [value for value in VALUES if sum(judge.is_valid(value) for judge in judges) > 1]


@pytest.mark.parametrize("name", APART)
def test_parts_that_exclude_each_other(name):
    assert twice_valid(APART[name]) == []
    for schema in both_ways(APART[name]):
        assert json_schema_grammar(json.dumps(schema), True)


@pytest.mark.parametrize("name", TOGETHER)
def test_parts_that_may_hold_at_the_same_time(name):
    assert twice_valid(TOGETHER[name])
    for schema in both_ways(TOGETHER[name]):
        with pytest.raises(NotEnforceableError, match="'oneOf' whose parts may be valid at the same time"):
            json_schema_grammar(json.dumps(schema), True)
