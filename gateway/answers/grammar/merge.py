"""Schemas without `$ref`, `allOf`, `anyOf` and `oneOf`: one for each way in which a value can be valid."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmops.gateway.answers.grammar.errors import NotEnforceableError, NothingError
from llmops.gateway.answers.grammar.work import spend

Schema = Mapping[str, Any] | bool
Flat = dict[str, Any]

_TIGHTER: dict[str, Callable[[Any, Any], Any]] = {
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
APPLIED = ("$ref", "allOf", "anyOf", "oneOf")
# what is checked nowhere here
UNENFORCED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
KEYWORDS = frozenset(
    {
        *_TIGHTER, *APPLIED, *UNENFORCED, "type", "enum", "const", "multipleOf", "pattern", "format", "properties",
        "required", "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties", "items",
        "prefixItems", "additionalItems", "uniqueItems",
    }
)  # fmt: skip
_MOST_WAYS, _DEEPEST = 64, 24
_CHARACTERS_PER_STEP = 64


def own(schema: Schema) -> Flat:
    """Without annotations. Raises NothingError for `false`."""
    if isinstance(schema, bool):
        if not schema:
            raise NothingError("'false' allows nothing")
        return {}
    spend(1 + len(schema))
    return {key: value for key, value in schema.items() if key in KEYWORDS and (value is not None or key == "const")}


def types_of(flat: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema allows, None for all."""
    given = flat.get("type")
    return None if given is None else {given} if isinstance(given, str) else set(given)


def canonical(value: Any) -> str:
    """Equal texts for equal JSON values."""
    text = json.dumps(_whole(value), sort_keys=True)
    spend(2 + len(text) // _CHARACTERS_PER_STEP)
    return text


def _whole(value: Any) -> Any:
    """`value` with 1 for each 1.0 in it."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def merged(first: Flat, second: Flat) -> Flat:
    """What both allow. Raises NotEnforceableError when that cannot be said in one schema."""
    spend(5 + len(first) + len(second))
    result = dict(first)
    for key, value in second.items():
        if key not in result:
            result[key] = value
        elif key in _TIGHTER:
            result[key] = _TIGHTER[key](result[key], value)
        elif key in _JOINED:
            result[key] = _JOINED[key](result[key], value)
        elif canonical(result[key]) != canonical(value):
            raise NotEnforceableError(f"two different '{key}' hold at the same time")
    _close(result, first, second)
    return result


def _close(result: Flat, first: Flat, second: Flat) -> None:
    """A property that only one side declares is an additional one to the other."""
    if "properties" not in result:
        return
    properties = dict(result["properties"])
    for side in (first, second):
        rest = side.get("additionalProperties", True)
        if rest is not True:
            if side.get("patternProperties"):
                raise NotEnforceableError("'patternProperties' go together with other properties that hold as well")
            spend(len(properties))
            for name in properties.keys() - side.get("properties", {}).keys():
                properties[name] = _both(properties[name], rest)
    result["properties"] = properties


def _both(first: Schema, second: Schema) -> Schema:
    if first is True or second is True or first == second:
        return second if first is True else first
    return {"allOf": [first, second]} if first is not False and second is not False else False


def _types(first: Any, second: Any) -> list[str]:
    left, right = types_of({"type": first}) or set(), types_of({"type": second}) or set()
    both = left & right
    for one, other in ((left, right), (right, left)):
        if "number" in one and "integer" in other:
            both.add("integer")
    if not both:
        raise NothingError("the combined schemas allow no type")
    return sorted(both)


def _values(first: Any, second: Any) -> list[Any]:
    allowed = {canonical(value) for value in second}
    found = [value for value in first if canonical(value) in allowed]
    if not found:
        raise NothingError("the combined schemas allow no value")
    return found


def _required(first: Any, second: Any) -> list[str]:
    spend(len(first) + len(second))
    return list(dict.fromkeys([*first, *second]))


def _properties(first: Any, second: Any) -> dict[str, Any]:
    spend(len(first) + len(second))
    return {**first, **{name: _both(first.get(name, True), schema) for name, schema in second.items()}}


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "enum": _values,
    "properties": _properties,
    "required": _required,
    "items": _both,
    "additionalProperties": _both,
    "uniqueItems": lambda first, second: first or second,
}


class Ways:
    """Flat schemas of a schema; a value is valid by it when it is by one of them. What a reference stands for is worked
    out once, however often the schema says it.

    `one_of` objects to overlapping parts.
    """

    def __init__(self, resolve: Callable[[str], Schema], one_of: Callable[[Sequence[Schema]], None]) -> None:
        self._resolve = resolve
        self._one_of = one_of
        self._known: dict[str, list[Flat]] = {}

    def __call__(self, schema: Schema, depth: int = 0) -> list[Flat]:
        """Raises NothingError when there is none, and NotEnforceableError."""
        spend()
        if depth > _DEEPEST:
            raise NotEnforceableError("it refers to itself endlessly")
        given = own(schema)
        base = {key: value for key, value in given.items() if key not in APPLIED}
        if "const" in base:
            const = base.pop("const")
            base["enum"] = _values([const], base.get("enum", [const]))
        found = [base]
        for inner in self._parts(given, depth + 1):
            found = [both for way in found for other in inner if (both := _if_any(way, other)) is not None]
            if len(found) > _MOST_WAYS:
                raise NotEnforceableError(f"it combines alternatives in more than {_MOST_WAYS} ways")
        if not found:
            raise NothingError("the combined schemas allow nothing")
        return found

    def _parts(self, given: Flat, depth: int) -> Iterator[list[Flat]]:
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

    def _referred(self, reference: str, depth: int) -> list[Flat]:
        if reference not in self._known:
            self._known[reference] = self._possible(self._resolve(reference), depth)
        return self._known[reference]

    def _possible(self, schema: Schema, depth: int) -> list[Flat]:
        try:
            return self(schema, depth)
        except NothingError:
            return []


def _if_any(first: Flat, second: Flat) -> Flat | None:
    try:
        return merged(first, second)
    except NothingError:
        return None


def type_of(value: Any) -> str:
    """The JSON Schema type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]
