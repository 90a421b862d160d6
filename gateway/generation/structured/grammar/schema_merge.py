"""Flat schemas: schemas without `$ref`, `allOf`, `anyOf` and `oneOf`.

A schema has one flat schema for each way in which a value can be valid.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmops.gateway.generation.structured.grammar.compile_limits import (
    NotEnforceableError,
    UnsatisfiableSchemaError,
    spend_steps,
)

Schema = Mapping[str, Any] | bool
FlatSchema = dict[str, Any]

_TIGHTEN: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems"), min),
}

#: Keywords that apply other schemas to the same value.
APPLICATOR_KEYWORDS = ("$ref", "allOf", "anyOf", "oneOf")

#: Keywords that no grammar of this package enforces.
UNENFORCED_KEYWORDS = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "minProperties", "maxProperties", "patternProperties", "unevaluatedItems", "$dynamicRef",
    "$recursiveRef",
)  # fmt: skip

#: All keywords that determine which values are valid. Other keywords are annotations.
KNOWN_KEYWORDS = frozenset(
    {
        *_TIGHTEN, *APPLICATOR_KEYWORDS, *UNENFORCED_KEYWORDS, "type", "enum", "const", "multipleOf", "pattern",
        "format", "properties", "required", "additionalProperties", "propertyNames", "unevaluatedProperties",
        "items", "prefixItems", "additionalItems", "uniqueItems",
    }
)  # fmt: skip

#: Maximum number of flat schemas of one schema. The number grows exponentially with the client's
#: schema.
_MAX_ALTERNATIVES = 64
#: Maximum nesting of schemas applied inside each other, which bounds the recursion.
_MAX_DEPTH = 24

#: Characters of JSON that are written in one step of work.
_CHARACTERS_PER_STEP = 64


def without_annotations(schema: Schema) -> FlatSchema:
    """Return the keywords of `schema` that determine which values are valid.

    Raises:
        UnsatisfiableSchemaError: The schema is `false`.
    """
    if isinstance(schema, bool):
        if not schema:
            raise UnsatisfiableSchemaError("'false' allows nothing")
        return {}
    spend_steps(1 + len(schema))
    keywords = {
        key: value for key, value in schema.items() if key in KNOWN_KEYWORDS and (value is not None or key == "const")
    }
    if "patternProperties" in keywords:
        # The patterns are not enforced, so any name may belong to one.
        keywords["additionalProperties"] = True
    return keywords


def allowed_types(flat: Mapping[str, Any]) -> set[str] | None:
    """Return the types that a schema allows; None if it allows all types."""
    types = flat.get("type")
    return None if types is None else {types} if isinstance(types, str) else set(types)


def json_type(value: Any) -> str:
    """Return the JSON Schema type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    types: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return types[type(value)]


def canonical_json(value: Any) -> str:
    """Return a text for a JSON value that is the same for equal values."""
    text = json.dumps(_normalize_numbers(value), sort_keys=True)
    spend_steps(2 + len(text) // _CHARACTERS_PER_STEP)
    return text


def _normalize_numbers(value: Any) -> Any:
    """Return a copy of `value` in which floats such as 1.0 are integers."""
    if isinstance(value, list):
        return [_normalize_numbers(one) for one in value]
    if isinstance(value, dict):
        return {name: _normalize_numbers(one) for name, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def merge_schemas(first: FlatSchema, second: FlatSchema) -> FlatSchema:
    """Return the flat schema of the values that both schemas allow.

    Raises:
        NotEnforceableError: No flat schema expresses the values that both schemas allow.
    """
    spend_steps(5 + len(first) + len(second))
    result = dict(first)
    for key, value in second.items():
        merge = _TIGHTEN.get(key) or _INTERSECT.get(key)
        if key not in result:
            result[key] = value
        elif merge is not None:
            result[key] = merge(result[key], value)
        elif canonical_json(result[key]) != canonical_json(value):
            raise NotEnforceableError(f"two values of '{key}' apply at the same time; keep one")
    if "properties" in result:
        result["properties"] = _merge_additional(result["properties"], first, second)
    return result


def _merge_additional(merged: Mapping[str, Schema], first: FlatSchema, second: FlatSchema) -> dict[str, Schema]:
    """Return `merged`, the properties of two combined schemas, restricted further.

    The `additionalProperties` of each schema apply to the properties that only the other schema
    declares.
    """
    properties = dict(merged)
    for side in (first, second):
        rest = side.get("additionalProperties", True)
        if rest is not True:
            spend_steps(len(properties))
            for name in properties.keys() - side.get("properties", {}).keys():
                properties[name] = _merge_subschemas(properties[name], rest)
    return properties


def _merge_subschemas(first: Schema, second: Schema) -> Schema:
    if first is True or second is True or first == second:
        return second if first is True else first
    return {"allOf": [first, second]} if first is not False and second is not False else False


def _merge_types(first: Any, second: Any) -> list[str]:
    left, right = allowed_types({"type": first}) or set(), allowed_types({"type": second}) or set()
    both = left & right
    for one, other in ((left, right), (right, left)):
        if "number" in one and "integer" in other:
            both.add("integer")
    if not both:
        raise UnsatisfiableSchemaError("the combined schemas allow no type")
    return sorted(both)


def _merge_enums(first: Any, second: Any) -> list[Any]:
    allowed = {canonical_json(value) for value in second}
    found = [value for value in first if canonical_json(value) in allowed]
    if not found:
        raise UnsatisfiableSchemaError("the combined schemas allow no value")
    return found


def _merge_required(first: Any, second: Any) -> list[str]:
    spend_steps(len(first) + len(second))
    return list(dict.fromkeys([*first, *second]))


def _merge_properties(first: Any, second: Any) -> dict[str, Any]:
    spend_steps(len(first) + len(second))
    return {**first, **{name: _merge_subschemas(first.get(name, True), schema) for name, schema in second.items()}}


_INTERSECT: dict[str, Callable[[Any, Any], Any]] = {
    "type": _merge_types,
    "enum": _merge_enums,
    "properties": _merge_properties,
    "required": _merge_required,
    "items": _merge_subschemas,
    "additionalProperties": _merge_subschemas,
    "uniqueItems": lambda first, second: first or second,
}


class SchemaAlternatives:
    """A table that maps each schema to its flat schemas.

    A value is valid by a schema if one of the flat schemas allows it. Each reference is resolved
    once.
    """

    def __init__(self, resolve: Callable[[str], Schema], check_one_of: Callable[[Sequence[Schema]], None]) -> None:
        """Create the table.

        `check_one_of` raises an error for the parts of a `oneOf` that may overlap.
        """
        self._resolve = resolve
        self._check_one_of = check_one_of
        self._by_reference: dict[str, list[FlatSchema]] = {}

    def __call__(self, schema: Schema, depth: int = 0) -> list[FlatSchema]:
        """Return the flat schemas of `schema`.

        Raises:
            UnsatisfiableSchemaError: No value is valid.
            NotEnforceableError: Flat schemas cannot express the schema.
        """
        spend_steps()
        if depth > _MAX_DEPTH:
            raise NotEnforceableError("it refers to itself without end")
        keywords = without_annotations(schema)
        base = {key: value for key, value in keywords.items() if key not in APPLICATOR_KEYWORDS}
        if "const" in base:
            const = base.pop("const")
            base["enum"] = _merge_enums([const], base.get("enum", [const]))
        found = [base]
        for alternatives in self._applied(keywords, depth + 1):
            pairs = itertools.product(found, alternatives)
            found = [both for pair in pairs if (both := _merge_if_satisfiable(*pair)) is not None]
            if len(found) > _MAX_ALTERNATIVES:
                raise NotEnforceableError(
                    f"the combinations of its anyOf, oneOf and allOf are more than {_MAX_ALTERNATIVES}; use fewer"
                )
        if not found:
            raise UnsatisfiableSchemaError("the combined schemas allow no value")
        return found

    def _applied(self, keywords: FlatSchema, depth: int) -> Iterator[list[FlatSchema]]:
        """Yield lists of flat schemas. A valid value must be allowed by one schema of each list."""
        for part in keywords.get("allOf", ()):
            yield self._or_none(part, depth)
        if "$ref" in keywords:
            reference = keywords["$ref"]
            if reference not in self._by_reference:
                self._by_reference[reference] = self._or_none(self._resolve(reference), depth)
            yield self._by_reference[reference]
        if "oneOf" in keywords:
            self._check_one_of(keywords["oneOf"])
        for key in ("anyOf", "oneOf"):
            if key in keywords:
                yield [flat for part in keywords[key] for flat in self._or_none(part, depth)]

    def _or_none(self, schema: Schema, depth: int) -> list[FlatSchema]:
        try:
            return self(schema, depth)
        except UnsatisfiableSchemaError:
            return []


def _merge_if_satisfiable(first: FlatSchema, second: FlatSchema) -> FlatSchema | None:
    try:
        return merge_schemas(first, second)
    except UnsatisfiableSchemaError:
        return None


# -- oneOf


def may_overlap(parts: Sequence[Schema], alternatives: Callable[[Schema], list[FlatSchema]]) -> bool:
    """Return True if two of the `oneOf` parts may allow the same value.

    The result is False only if all parts are obviously disjoint.
    """
    flats = [alternatives(part) for part in parts]
    pairs = itertools.combinations(flats, 2)
    return any(not _are_disjoint(one, other, alternatives) for left, right in pairs for one in left for other in right)


def _are_disjoint(one: FlatSchema, other: FlatSchema, alternatives: Callable[[Schema], list[FlatSchema]]) -> bool:
    spend_steps(5)
    left, right = _value_types(one), _value_types(other)
    if left is not None and right is not None and not left & right:
        return True
    if "enum" in one and "enum" in other:
        return not set(map(canonical_json, one["enum"])) & set(map(canonical_json, other["enum"]))
    if left == right == {"object"}:
        return (
            _requires_forbidden(one, other)
            or _requires_forbidden(other, one)
            or _has_discriminator(one, other, alternatives)
        )
    return False


def _value_types(flat: FlatSchema) -> set[str] | None:
    if "enum" in flat:
        spend_steps(len(flat["enum"]))
        found: set[str] | None = {json_type(value) for value in flat["enum"]}
    else:
        found = allowed_types(flat) or ({"object"} if "properties" in flat else None)
    return {"number" if kind == "integer" else kind for kind in found} if found else None


def _requires_forbidden(one: FlatSchema, other: FlatSchema) -> bool:
    """Return True if `one` requires a property that no object allowed by `other` can have."""
    spend_steps(len(one.get("required", ())))
    is_closed = other.get("additionalProperties", True) is False
    return is_closed and any(name not in other.get("properties", {}) for name in one.get("required", ()))


def _has_discriminator(one: FlatSchema, other: FlatSchema, alternatives: Callable[[Schema], list[FlatSchema]]) -> bool:
    """Return True if a required property of one schema has different values in both schemas."""
    spend_steps(len(one.get("required", ())) + len(other.get("required", ())))
    for name in {*one.get("required", ()), *other.get("required", ())}:
        left, right = (_enum_values(flat.get("properties", {}).get(name, True), alternatives) for flat in (one, other))
        if left is not None and right is not None and not left & right:
            return True
    return False


def _enum_values(schema: Any, alternatives: Callable[[Schema], list[FlatSchema]]) -> set[str] | None:
    flats = alternatives(schema)
    if not all("enum" in flat for flat in flats):
        return None
    return {canonical_json(value) for flat in flats for value in flat["enum"]}
