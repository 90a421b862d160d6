"""Any JSON Schema of a family gives output that is valid under it, from the real engine."""

import json

import httpx
import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": 5, "maximum": 177},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0.25},
        {"type": "string", "minLength": 1, "maxLength": 5},
        {"enum": ["red", "green", 3, None]},
        {"const": 'fixed \u00e9 " text'},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        {"$ref": "#/$defs/kind"},
    ]
)
NAMES = st.text("abcXYZ_0123456789é", min_size=1, max_size=8)


def objects(inner):
    def build(properties, optional):
        required = [name for name in properties if name != optional]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.dictionaries(NAMES, inner, min_size=1, max_size=3).flatmap(
        lambda found: st.sampled_from([None, *found]).map(lambda optional: build(found, optional))
    )


def lists(inner):
    return inner.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2})


VALUES = st.recursive(LEAVES, lambda inner: objects(inner) | lists(inner) | st.tuples(inner, inner).map(
    lambda pair: {"anyOf": list(pair)}
), max_leaves=4)  # fmt: skip


@settings(max_examples=6, database=None, suppress_health_check=list(HealthCheck))
@given(objects(VALUES))
def check(base_url, schema):
    schema = {"$defs": {"kind": {"enum": ["a", "b"]}}, **schema}
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Invent something."}],
        "max_tokens": 150,
        "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
    }
    answer = httpx.post(base_url + "/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_any_schema_of_the_family(base_url):
    check(base_url)
