"""Tests of output forms that clients may request, and of the errors for other forms."""

import json

import pytest

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.structured.request_guide import parse_guide
from llmops.gateway.generation.structured.schema_validation import pattern_problem, tool_calls_schema, validate_schema
from llmops.gateway.interfaces import Guide
from llmops.gateway.schemas.chat_request import ChatRequest

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}

GRAMMAR = 'root ::= item{1,3} ("," [^"\\]] ws)*\nitem ::= "a\\"b" | [a-z]+ # any\nws ::= [ \\t]*'


def chat(**fields):
    return ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}], **fields)


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def test_each_source():
    text = {"type": "text"}
    assert [parse_guide(chat(**fields)) for fields in ({}, {"response_format": text})] == [None, None]
    assert parse_guide(chat(response_format={"type": "json_object"})) == Guide("json_schema", '{"type":"object"}')
    assert parse_guide(chat(guided_regex=r"\d+")) == Guide("regex", r"\d+")
    assert parse_guide(chat(guided_grammar=GRAMMAR)) == Guide("ebnf_grammar", GRAMMAR)
    assert parse_guide(chat(response_format=text, guided_regex="a")) == Guide("regex", "a")


@pytest.mark.parametrize(
    ("field", "value"),
    [("response_format", json_schema(PERSON)), ("guided_json", PERSON), ("guided_json", json.dumps(PERSON))],
)
def test_schema_keeps_its_key_order(field, value):
    guide = parse_guide(chat(**{field: value}))
    assert (guide.kind, [*json.loads(guide.text)["properties"]]) == ("json_schema", ["name", "age"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({"type": "strin"})}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"), ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a\0b"}, "guided_regex"),
        ({"guided_json": {"type": "string", "pattern": "\0"}}, "guided_json"),
        ({"guided_grammar": 'root ::= "\0"'}, "guided_grammar"), ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a\0b"]}, "guided_choice"), ({"guided_grammar": "  "}, "guided_grammar"),
        ({"guided_grammar": "root ::= foo"}, "guided_grammar"), ({"guided_regex": "(?<=a)b"}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ],
)  # fmt: skip
def test_refused_with_the_field(fields, param):
    with pytest.raises(InvalidRequestError) as refused:
        parse_guide(chat(**fields))
    assert (refused.value.param, refused.value.status) == (param, 400)


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "date"}, '"date" is not a type'), ({"enum": []}, "'enum' must be a list with at least one"),
        ({"enum": "ab"}, "'enum' must be a list with at least one value at '#'"),
        ({"properties": []}, "'properties' must be an object"),
        ({"properties": {"a": 1}}, "must be an object or a boolean at '/properties/a'"),
        ({"anyOf": {}}, "'anyOf' must be a list"), ({"$ref": "#/$defs/x"}, "has no target"),
        ({"$ref": "https://example.com/schema"}, "does not point into the schema itself"),
        ({"$ref": "#"}, "only leads back to itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "only leads back to itself"),
        ({"minimum": 5, "maximum": 2}, "is more than"), ({"anyOf": [False]}, "allows nothing"),
        (False, "allows nothing"), ({"pattern": "([a-z]{1,5000}){1,50}"}, "repeats something more"),
        ({"required": "name"}, "list of property names"), (nested(80), "nested deeper than 64"),
        ({"required": ["a", 1]}, "list of property names"),
        ({"type": ["string", 1]}, "1 is not a type (use one of array, boolean, integer, null, number, object, string)"),
        ({"maxLength": True}, "'maxLength' must be a whole number, 0 or more"),
        ({"maxLength": 1.5}, "whole number"), ({"maxLength": -1}, "whole number"),
        ({"maximum": True}, "'maximum' must be a number"),
        ({"items": [True, 1]}, "must be an object or a boolean at '/items/1'"),
        ({"anyOf": [{}, {"properties": {"a": {"prefixItems": [1]}}}]}, "at '/anyOf/1/properties/a/prefixItems/0'"),
        ({"pattern": 5}, "a pattern must be a string that is not empty"),
        ({"pattern": ""}, "a pattern must be a string that is not empty"),
        ({"pattern": "a{5000,}b{2}"}, "repeats something more than 8192 times"),
        ({"pattern": "(?i)a"}, "the pattern uses (?i, which grammars cannot express"),
        ({"$ref": 5}, "'$ref' 5 does not point into the schema itself"),
        ({"properties": {f"p{at}": {} for at in range(5000)}}, "it has more than 5000 parts"),
        ({"maxItems": 8193}, "'maxItems' is 8193, and the limit is 8192"),
        ({"pattern": "a" * 4097}, "the pattern has 4097 characters, and the limit is 4096"),
        ({"items": [{"type": "string", "maxLength": 8000}] * 3}, "add up to more than 16384"),
        ({"enum": ["x" * 70_000]}, "the limit is 65536"), ([], "must be a JSON Schema"),
    ],
)  # fmt: skip
def test_schema_problems_say_what_and_where(schema, says):
    with pytest.raises(InvalidRequestError, match="JSON Schema") as refused:
        validate_schema(schema, "p")
    assert says in refused.value.message


def test_recursive_schema_is_fine():
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    assert json.loads(validate_schema(tree, "p")) == tree


def test_calls_schema_accepts_calls_and_nothing_else():
    jsonschema = pytest.importorskip("jsonschema")
    node = {"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"v": {"$ref": "#/$defs/n"}}}
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}, "required": ["kids"]}
    schema = tool_calls_schema([("node", node), ("tree", tree), ("now", None)], many=True)
    valid = jsonschema.Draft202012Validator(json.loads(validate_schema(schema, "tools"))).is_valid
    assert valid([{"name": "node", "arguments": {"v": 1}}])
    assert valid([{"name": "tree", "arguments": {"kids": [{"kids": []}]}}, {"name": "now", "arguments": {}}])
    assert not valid([])
    for name, arguments in (("node", {"v": "x"}), ("tree", {"kids": [{}]}), ("now", {"x": 1}), ("other", {})):
        assert not valid([{"name": name, "arguments": arguments}]), name
    one = jsonschema.Draft202012Validator(tool_calls_schema([("now", None)], many=False)).is_valid
    assert not one([{"name": "now", "arguments": {}}] * 2)


@pytest.mark.parametrize("part", [*(f"\\{letter}" for letter in "bBAZzkpP19"), "(?=a", "(?i", "(?P<"])
def test_what_grammars_cannot_express(part):
    assert pattern_problem(f"a{part}b)").startswith(f"the pattern uses {part}"[:20])
