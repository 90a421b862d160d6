"""Schemas without `$ref`, `allOf`, `anyOf` and `oneOf`: one for each way in which a value can be valid."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmops.gateway.generation.structured.grammar.errors import NotEnforceableError, UnsatisfiableSchemaError
from llmops.gateway.generation.structured.grammar.work_budget import spend_steps

Schema = Mapping[str, Any] | bool
FlatSchema = dict[str, Any]

_TIGHTEN: dict[str, Callable[[Any, Any], Any]] = {
    "minimum": max,
    "exclusiveMinimum": max,
    "minLength": max,
    "minItems": max,
    "minProperties": max,
    "maximum": min,
    "exclusiveMaximum": min,
    "maxLength": min,
    "maxItems": min,
    "maxProperties": min,
}
APPLICATOR_KEYWORDS = ("$ref", "allOf", "anyOf", "oneOf")
# what is checked nowhere here
UNENFORCED_KEYWORDS = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
KNOWN_KEYWORDS = frozenset(
    {
        *_TIGHTEN, *APPLICATOR_KEYWORDS, *UNENFORCED_KEYWORDS, "type", "enum", "const", "multipleOf", "pattern", "format", "properties",
        "required", "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties", "items",
        "prefixItems", "additionalItems", "uniqueItems",
    }
)  # fmt: skip
_MAX_ALTERNATIVES, _MAX_DEPTH = 64, 24
_CHARACTERS_PER_STEP = 64


def without_annotations(schema: Schema) -> FlatSchema:
    """Without annotations. Raises UnsatisfiableSchemaError for `false`."""
    if isinstance(schema, bool):
        if not schema:
            raise UnsatisfiableSchemaError("'false' allows nothing")
        return {}
    spend_steps(1 + len(schema))
    return {
        key: value for key, value in schema.items() if key in KNOWN_KEYWORDS and (value is not None or key == "const")
    }


def allowed_types(flat: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema allows, None for all."""
    given = flat.get("type")
    return None if given is None else {given} if isinstance(given, str) else set(given)


def canonical_json(value: Any) -> str:
    """Equal texts for equal JSON values."""
    text = json.dumps(_normalize_numbers(value), sort_keys=True)
    spend_steps(2 + len(text) // _CHARACTERS_PER_STEP)
    return text


def _normalize_numbers(value: Any) -> Any:
    """`value` with 1 for each 1.0 in it."""
    if isinstance(value, list):
        return [_normalize_numbers(one) for one in value]
    if isinstance(value, dict):
        return {name: _normalize_numbers(one) for name, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def merge_schemas(first: FlatSchema, second: FlatSchema) -> FlatSchema:
    """What both allow. Raises NotEnforceableError when that cannot be said in one schema."""
    spend_steps(5 + len(first) + len(second))
    result = dict(first)
    for key, value in second.items():
        if key not in result:
            result[key] = value
        elif key in _TIGHTEN:
            result[key] = _TIGHTEN[key](result[key], value)
        elif key in _INTERSECT:
            result[key] = _INTERSECT[key](result[key], value)
        elif canonical_json(result[key]) != canonical_json(value):
            raise NotEnforceableError(f"two different '{key}' hold at the same time")
    _close(result, first, second)
    return result


def _close(result: FlatSchema, first: FlatSchema, second: FlatSchema) -> None:
    """A property that only one side declares is an additional one to the other."""
    if "properties" not in result:
        return
    properties = dict(result["properties"])
    for side in (first, second):
        rest = side.get("additionalProperties", True)
        if rest is not True:
            if side.get("patternProperties"):
                raise NotEnforceableError("'patternProperties' go together with other properties that hold as well")
            spend_steps(len(properties))
            for name in properties.keys() - side.get("properties", {}).keys():
                properties[name] = _merge_subschemas(properties[name], rest)
    result["properties"] = properties


def _merge_subschemas(first: Schema, second: Schema) -> Schema:
    if first is True or second is True or first == second:
        return second if first is True else first
    return {"allOf": [first, second]} if first is not False and second is not False else False


def _types(first: Any, second: Any) -> list[str]:
    left, right = allowed_types({"type": first}) or set(), allowed_types({"type": second}) or set()
    both = left & right
    for one, other in ((left, right), (right, left)):
        if "number" in one and "integer" in other:
            both.add("integer")
    if not both:
        raise UnsatisfiableSchemaError("the combined schemas allow no type")
    return sorted(both)


def _values(first: Any, second: Any) -> list[Any]:
    allowed = {canonical_json(value) for value in second}
    found = [value for value in first if canonical_json(value) in allowed]
    if not found:
        raise UnsatisfiableSchemaError("the combined schemas allow no value")
    return found


def _required(first: Any, second: Any) -> list[str]:
    spend_steps(len(first) + len(second))
    return list(dict.fromkeys([*first, *second]))


def _properties(first: Any, second: Any) -> dict[str, Any]:
    spend_steps(len(first) + len(second))
    return {**first, **{name: _merge_subschemas(first.get(name, True), schema) for name, schema in second.items()}}


_INTERSECT: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "enum": _values,
    "properties": _properties,
    "required": _required,
    "items": _merge_subschemas,
    "additionalProperties": _merge_subschemas,
    "uniqueItems": lambda first, second: first or second,
}


class SchemaAlternatives:
    """Flat schemas of a schema; a value is valid by it when it is by one of them. What a reference stands for is worked
    out once, however often the schema says it.

    `one_of` objects to overlapping parts.
    """

    def __init__(self, resolve: Callable[[str], Schema], one_of: Callable[[Sequence[Schema]], None]) -> None:
        self._resolve = resolve
        self._one_of = one_of
        self._known: dict[str, list[FlatSchema]] = {}

    def __call__(self, schema: Schema, depth: int = 0) -> list[FlatSchema]:
        """Raises UnsatisfiableSchemaError when there is none, and NotEnforceableError."""
        spend_steps()
        if depth > _MAX_DEPTH:
            raise NotEnforceableError("it refers to itself endlessly")
        given = without_annotations(schema)
        base = {key: value for key, value in given.items() if key not in APPLICATOR_KEYWORDS}
        if "const" in base:
            const = base.pop("const")
            base["enum"] = _values([const], base.get("enum", [const]))
        found = [base]
        for inner in self._parts(given, depth + 1):
            found = [both for way in found for other in inner if (both := _if_any(way, other)) is not None]
            if len(found) > _MAX_ALTERNATIVES:
                raise NotEnforceableError(f"it combines alternatives in more than {_MAX_ALTERNATIVES} ways")
        if not found:
            raise UnsatisfiableSchemaError("the combined schemas allow nothing")
        return found

    def _parts(self, given: FlatSchema, depth: int) -> Iterator[list[FlatSchema]]:
        """Ways of which one of each must hold."""
        for part in given.get("allOf", ()):
            yield self._possible(part, depth)
        if "$ref" in given:
            yield self._referred(given["$ref"], depth)
        if "oneOf" in given:
            self._one_of(given["oneOf"])
        for key in ("anyOf", "oneOf"):
            if key in given:
                yield [way for part in given[key] for way in self._possible(part, depth)]

    def _referred(self, reference: str, depth: int) -> list[FlatSchema]:
        if reference not in self._known:
            self._known[reference] = self._possible(self._resolve(reference), depth)
        return self._known[reference]

    def _possible(self, schema: Schema, depth: int) -> list[FlatSchema]:
        try:
            return self(schema, depth)
        except UnsatisfiableSchemaError:
            return []


def _if_any(first: FlatSchema, second: FlatSchema) -> FlatSchema | None:
    try:
        return merge_schemas(first, second)
    except UnsatisfiableSchemaError:
        return None


def json_type(value: Any) -> str:
    """The JSON Schema type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]
