"""JSON Schemas that are slow to match, to merge or to write down, broken in a keyword, or nearly right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.faults.fuzz.base import Case, Target, chat

Schema = Any

# backtracking matchers are exponential in these, or polynomial of a high degree
PATTERNS = (
    "^(a+)+$", "^(a|aa)*$", "^(a*)*b$", "(a|a)*c", "(.*a){12}", "^(([a-z])+.)+[A-Z]([a-z])+$", "(a?){30}a{30}",
    "(x+x+)+y", "(a|b)*a(a|b){20}", "[^a]{1,200}", "(", "[", "a{", "a{2,1}", "(?<n>a)", r"\1", "(?=a)b", "", "\\", "*",
    "a" * 3000, "(" * 90, "((a{0,30}){0,30}){0,30}", "a{1,8192}", "a{99999999}",
    "[" + "".join(chr(200 + 2 * at) for at in range(900)) + "]{1,9}",
)  # fmt: skip
# values that no keyword takes
_ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    5,
    0.5,
    1e308,
    10**300,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    {"": 5},
    ["a"] * 50,
)
_KEYWORDS = (
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "unevaluatedProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems",
    "contains", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$defs",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
)  # fmt: skip


def cases(target: Target, chance: random.Random) -> Iterator[Case]:
    """One schema each, in each of the fields that take one."""
    while True:
        schema = chance.choice(_MAKERS)(chance)
        if chance.random() < 0.3:
            schema = _spoilt(schema, chance)
        yield chat(target, **_field(schema, chance))


def _field(schema: Schema, chance: random.Random) -> dict[str, Any]:
    strict = chance.random() < 0.7
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": strict, "schema": schema}}
    function = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
    return chance.choice(
        (
            {"response_format": form},
            {"guided_json": schema},
            {"guided_json": json.dumps(schema)},
            {"structured_outputs": {"json": schema}},
            {"tools": [function], "tool_choice": "required"},
        )
    )


def _text(chance: random.Random) -> str:
    return "a" * chance.choice((0, 1, 26, 40, 3000)) + chance.choice(("", "!", "b", "\n", "é", "\ud800"))


def _matched(chance: random.Random) -> Schema:
    """A pattern against texts of the schema itself."""
    pattern, text = chance.choice(PATTERNS), _text(chance)
    return chance.choice(
        (
            {"enum": [text, "a"], "pattern": pattern},
            {"const": text, "pattern": pattern},
            {"type": "object", "properties": {text: {}}, "patternProperties": {pattern: {"type": "null"}}},
            {"type": "object", "required": [text], "patternProperties": {pattern: {}, "^x": {}}},
            {"type": "object", "properties": {text: {}}, "propertyNames": {"pattern": pattern}},
            {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False},
            {"type": "string", "pattern": pattern, "maxLength": chance.choice((5, 250, 8000))},
            {"allOf": [{"enum": [text]}, {"pattern": pattern}]},
        )
    )


def _combined(chance: random.Random) -> Schema:
    """References that multiply on each level."""
    levels, width = chance.choice((3, 6, 10, 12, 40)), chance.choice((2, 10, 40))
    key = chance.choice(("allOf", "anyOf", "oneOf"))
    leaf = chance.choice(({"type": "object"}, {"enum": [1, 2]}, {"type": "string", "pattern": "^(a+)+$"}, {}))

    def level(at: int) -> Schema:
        inner = [{"$ref": f"#/$defs/d{at + 1}"}] * width
        shape = {key: inner}
        return shape if chance.random() < 0.8 else {"type": "object", "properties": {"p": shape}, **shape}

    definitions = {f"d{at}": level(at) for at in range(levels)} | {f"d{levels}": leaf}
    if chance.random() < 0.1:
        definitions[f"d{levels}"] = {"$ref": "#/$defs/d0"}
    return {"$defs": definitions, "allOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d0"}]}


def _long(chance: random.Random) -> Schema:
    """Much of one thing."""
    count = chance.choice((30, 300, 3000))
    chain = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(count)} | {f"d{count}": {}}
    return chance.choice(
        (
            {"$defs": chain, "$ref": "#/$defs/d0"},
            {"enum": [f"{at * 7919 % 100_000}" for at in range(count)]},
            {"oneOf": [{"type": "object", "required": [f"k{at}"]} for at in range(count)]},
            {"anyOf": [{"type": "string", "pattern": f"{at}{chance.choice(PATTERNS)}"} for at in range(count // 10)]},
            {
                "type": "object",
                "properties": {"a" * at: {} for at in range(min(count, 300))},
                "additionalProperties": {},
            },
            {"type": "object", "properties": {"k" * 9 * count: {"properties": {f"a{at}": {} for at in range(count)}}}},
            {
                "type": "object",
                "properties": {f"p{at}": _heavy_string(chance) for at in range(30)},
                "additionalProperties": False,
            },
            {"type": "array", "maxItems": count, "items": {"type": "array", "maxItems": count}},
        )
    )


def _heavy_string(chance: random.Random) -> Schema:
    """Some 250 places: seconds for an engine's compiler when there are thirty of them."""
    return {"type": "string", "maxLength": chance.choice((240, 250)), "title": str(chance.randrange(10**6))}


def _numbers(chance: random.Random) -> Schema:
    def bound() -> float:
        return chance.choice((0, -1, 0.1, 1e-300, 1e300, -1.7e308, 10**300, 2**63, chance.randrange(10**9) / 1000))

    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    given = {key: bound() for key in chance.sample(keys, chance.randrange(1, 4))}
    extra = chance.choice(({}, {"enum": [1, 1e300, 0.3, 10**40]}))
    return {"type": chance.choice(("number", "integer", ["integer", "string"])), **given, **extra}


def _nested(chance: random.Random) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(chance.choice((5, 30, 63, 64, 100, 400))):
        schema = chance.choice(
            (
                {"type": "object", "properties": {"p": schema}},
                {"anyOf": [schema, {"type": "null"}]},
                {"type": "array", "items": schema},
                {"allOf": [schema, {}]},
                {"not": schema},
            )
        )
    return schema


_MAKERS: tuple[Callable[[random.Random], Schema], ...] = (_matched, _matched, _combined, _long, _numbers, _nested)


def _spoilt(schema: Schema, chance: random.Random) -> Schema:
    """One keyword more, or with another value."""
    place = schema
    while isinstance(place, dict) and chance.random() < 0.5:
        inner = [child for child in place.values() if isinstance(child, dict)]
        if not inner:
            break
        place = chance.choice(inner)
    if isinstance(place, dict):
        place[chance.choice(_KEYWORDS)] = chance.choice((*_ODD, {"type": "string"}, [{"type": "string"}]))
    return schema
