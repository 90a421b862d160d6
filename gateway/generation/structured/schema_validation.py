"""Checks of JSON Schemas and patterns from clients, and schemas of forced tool calls.

The checks run before any engine sees the schemas and patterns.

The checks refuse schemas that would overload a grammar compiler (by size, depth, dangling or
circular references), and their errors name the wrong part. The package `grammar/` determines which
keywords are enforced.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.structured.grammar.compile_limits import NotEnforceableError
from llmops.gateway.generation.structured.grammar.regex_parser import parse_regex
from llmops.gateway.generation.structured.schema_references import POINTER_ERRORS, rebase_references, resolve_pointer
from llmops.gateway.settings import RequestLimits

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})

# Keywords by the form of their value: a schema, a list of schemas, schemas by name, a count, and a
# number.
_SCHEMA_KEYWORDS = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "additionalItems",
)  # fmt: skip
_SCHEMA_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNT_KEYWORDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_RANGES = (*zip(_COUNT_KEYWORDS[::2], _COUNT_KEYWORDS[1::2], strict=True), _NUMBER_KEYWORDS[:2], _NUMBER_KEYWORDS[2:4])

#: Maximum number of references in a chain, which bounds the work of following the chain.
_MAX_REFERENCE_CHAIN = 32

#: Pattern of the counts of repetitions: the 5 of `{5}` and `{5,}`, and both numbers of `{2,5}`.
_REPETITION = re.compile(r"(?<={)\d+(?=,?})|(?<=,)\d+(?=})")

#: Pattern of elements that grammars do not support: lookaround, back references, word boundaries,
#: Unicode classes and inline flags.
_UNSUPPORTED = re.compile(r"\\[bBAZzkpP1-9]|\(\?(?!:)[^)]{0,2}")


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """The limits of a schema from a client.

    Attributes:
        size: Maximum length as compact JSON, in characters.
        depth: Maximum levels of nested schemas.
        nodes: Maximum number of schemas inside the schema.
        repeats: The largest count, length or repetition.
        all_repeats: Maximum sum of counts, lengths and repetitions: a grammar compiler writes each
            of them out.
        pattern: Maximum length of a pattern, in characters.
        choices: Maximum number of texts of a choice.
        grammar: True if a grammar is compiled. Otherwise only the model reads the schema, and
            lengths, counts and patterns are not limited.
    """

    size: int = 65_536
    depth: int = 64
    nodes: int = 5_000
    repeats: int = 8_192
    all_repeats: int = 16_384
    pattern: int = 4_096
    choices: int = 1_024
    grammar: bool = True

    @classmethod
    def of(cls, limits: RequestLimits) -> SchemaLimits:
        """Return the limits that the gateway's settings define."""
        return cls(size=limits.schema_bytes, choices=limits.choices)


DEFAULT_LIMITS = SchemaLimits()
#: Maximum length of a schema whose check is cached, in characters. Bounds the cache to 32 MiB.
_MAX_CACHED_CHARACTERS = 16_384


def validate_schema(schema: object, param: str, limits: SchemaLimits = DEFAULT_LIMITS) -> str:
    """Return `schema` as compact JSON, after checking it. Keys keep their order.

    Properties are generated in the order of the keys.

    Args:
        schema: The schema.
        param: The request's field, for errors.
        limits: The limits of the schema.

    Raises:
        InvalidRequestError: The schema cannot be used. The message names the wrong part.
    """
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(f"'{param}' must be a JSON Schema: an object.", param=param)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"'{param}' is not valid JSON: {error}.", param=param) from None
    if len(text) > limits.size:
        problem: str | None = f"it has {len(text)} characters, and the limit is {limits.size}"
    else:
        # The cache keeps the text, which may have four bytes for each character.
        find = _find_problem if len(text) <= _MAX_CACHED_CHARACTERS else _find_problem.__wrapped__
        problem = find(text, limits)
    if problem:
        raise InvalidRequestError(f"'{param}' cannot be used as a JSON Schema: {problem}.", param=param)
    return text


@lru_cache(maxsize=512)
def _find_problem(text: str, limits: SchemaLimits) -> str | None:
    root = json.loads(text)
    resolve = lru_cache(maxsize=None)(lambda reference: resolve_pointer(root, reference))
    repeats = 0
    try:
        for count, (place, node) in enumerate(_subschemas(root), start=1):
            if count > limits.nodes:
                return f"it has more than {limits.nodes} parts"
            if place.depth > limits.depth:
                return f"it is nested deeper than {limits.depth} levels"
            problem = _node_problem(node, resolve, limits)
            if problem:
                return f"{problem} at '{place}'"
            repeats += _count_repeats(node)
            if limits.grammar and repeats > limits.all_repeats:
                return f"its lengths and counts add up to more than {limits.all_repeats}"
    except _KeywordTypeError as error:
        return str(error)
    return None


class _KeywordTypeError(Exception):
    """An error for a keyword whose value has the wrong type."""


class _SchemaLocation(NamedTuple):
    """The place of a schema inside another schema.

    The path is rendered only for errors, because a path of thousands of keys may be long.
    """

    parent: _SchemaLocation | None = None
    names: tuple[str | int, ...] = ()
    depth: int = 0

    def __str__(self) -> str:
        parts: list[str] = []
        place: _SchemaLocation | None = self
        while place is not None:
            parts[:0] = [f"/{name}" for name in place.names]
            place = place.parent
        return "".join(parts) or "#"


def _subschemas(root: object) -> Iterator[tuple[_SchemaLocation, object]]:
    """Yield every schema inside `root` with its place, depth first and without recursion."""
    stack: list[tuple[_SchemaLocation, object]] = [(_SchemaLocation(), root)]
    while stack:
        place, node = stack.pop()
        yield place, node
        if isinstance(node, dict):
            stack.extend(
                (_SchemaLocation(place, names, place.depth + 1), child) for names, child in _children(node, place)
            )


def _children(node: Mapping[str, Any], place: _SchemaLocation) -> Iterator[tuple[tuple[str | int, ...], object]]:
    for key in _SCHEMA_KEYWORDS:
        if isinstance(node.get(key), dict):
            yield (key,), node[key]
    for key in _SCHEMA_LIST_KEYWORDS:
        for at, child in enumerate(_typed_value(node, key, list, place)):
            yield (key, at), child
    if isinstance(node.get("items"), list):
        for at, child in enumerate(node["items"]):
            yield ("items", at), child
    for key in _SCHEMA_MAP_KEYWORDS:
        for name, child in _typed_value(node, key, dict, place).items():
            yield (key, name), child


def _typed_value(node: Mapping[str, Any], key: str, kind: type, place: _SchemaLocation) -> Any:
    value = node.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise _KeywordTypeError(f"'{key}' must be {'a list' if kind is list else 'an object'} at '{place}'")
    return value


def _node_problem(node: object, resolve: Callable[[str], object], limits: SchemaLimits) -> str | None:
    if isinstance(node, bool):
        return None if node else "a schema that is false allows nothing"
    if not isinstance(node, dict):
        return "a schema must be an object or a boolean"
    return (
        _type_problem(node)
        or _value_problem(node)
        or _reference_problem(node, resolve)
        or _list_problem(node)
        or _count_problem(node, limits)
        or (pattern_problem(node["pattern"], limits) if limits.grammar and node.get("pattern") is not None else None)
    )


def _type_problem(node: Mapping[str, Any]) -> str | None:
    types = node.get("type", [])
    types = types if isinstance(types, list) else [types]
    wrong = next((one for one in types if not isinstance(one, str) or one not in _TYPES), None)
    return None if wrong is None else f"{json.dumps(wrong)} is not a type (use one of {', '.join(sorted(_TYPES))})"


def _value_problem(node: Mapping[str, Any]) -> str | None:
    for key in (*_SCHEMA_KEYWORDS, "unevaluatedProperties", "unevaluatedItems"):
        if not isinstance(node.get(key), bool | dict | None) and not (key == "items" and isinstance(node[key], list)):
            return f"'{key}' must be a schema: an object or a boolean"
    for key in _NUMBER_KEYWORDS:
        if isinstance(node.get(key), bool) or not isinstance(node.get(key), int | float | None):
            return f"'{key}' must be a number"
    return None if isinstance(node.get("format"), str | None) else "'format' must be a string"


def _list_problem(node: Mapping[str, Any]) -> str | None:
    enum, required = node.get("enum"), node.get("required")
    if enum is not None and (not isinstance(enum, list) or not enum):
        return "'enum' must be a list with at least one value"
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        return "'required' must be a list of property names"
    return None


def _count_problem(node: Mapping[str, Any], limits: SchemaLimits) -> str | None:
    for key in _COUNT_KEYWORDS:
        value = node.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            return f"'{key}' must be a whole number, 0 or more"
        if limits.grammar and value > limits.repeats:
            return f"'{key}' is {value}, and the limit is {limits.repeats}"
    for low, high in _RANGES:
        least, most = node.get(low), node.get(high)
        if least is not None and most is not None and least > most:
            return f"'{low}' {least} is more than '{high}' {most}"
    return None


def _count_repeats(node: object) -> int:
    """Return the number of repetitions that a grammar compiler writes out for a schema."""
    if not isinstance(node, dict):
        return 0
    counts = max((node[key] for key in _COUNT_KEYWORDS if isinstance(node.get(key), int)), default=0)
    pattern = node.get("pattern")
    return int(counts) + (_count_pattern_repeats(pattern) if isinstance(pattern, str) else 0)


def _count_pattern_repeats(pattern: str) -> int:
    """Return the product of the counts in a pattern, because repetitions may be nested.

    Only the first digits of a count matter.
    """
    return math.prod(int(count.lstrip("0")[:10] or 1) for count in _REPETITION.findall(pattern))


def pattern_problem(pattern: object, limits: SchemaLimits = DEFAULT_LIMITS) -> str | None:
    """Return the reason why a regular expression cannot be used, or None if it can."""
    if not isinstance(pattern, str) or not pattern:
        return "a pattern must be a string that is not empty"
    if "\0" in pattern:
        # The engine's grammar library would read this character as the end of the pattern, and use
        # another pattern or crash.
        return "a pattern cannot have the character U+0000"
    if len(pattern) > limits.pattern:
        return f"the pattern has {len(pattern)} characters, and the limit is {limits.pattern}"
    if _count_pattern_repeats(pattern) > limits.repeats:
        return f"the pattern repeats something more than {limits.repeats} times"
    if unknown := _UNSUPPORTED.search(pattern.replace(r"\\", "")):
        return f"the pattern uses {unknown[0]}, which grammars cannot express"
    try:
        parse_regex(pattern)
    except NotEnforceableError as error:
        return str(error)
    return None


def _reference_problem(node: Mapping[str, Any], resolve: Callable[[str], object]) -> str | None:
    seen: list[str] = []
    target: object = node
    while isinstance(target, dict) and "$ref" in target:
        reference = target["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#"):
            return f"'$ref' {json.dumps(reference)} does not point into the schema itself"
        if reference in seen:
            return f"'$ref' {reference} only leads back to itself"
        if len(seen) >= _MAX_REFERENCE_CHAIN:
            return f"'$ref' {seen[0]} leads on through more than {_MAX_REFERENCE_CHAIN} references"
        seen.append(reference)
        try:
            target = resolve(reference)
        except POINTER_ERRORS:
            return f"'$ref' {reference} has no target"
    return None


def tool_calls_schema(functions: Sequence[tuple[str, Mapping[str, Any] | None]], many: bool) -> dict[str, Any]:
    """Return the schema of a list of function calls.

    The list has at least one call, and at most one unless `many` is True.

    Args:
        functions: The names and parameter schemas of the functions.
        many: True to allow several calls.
    """
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for at, (name, parameters) in enumerate(functions):
        definitions[f"f{at}"] = rebase_references(parameters_schema(parameters), f"#/$defs/f{at}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/f{at}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"$defs": definitions, "type": "array", "minItems": 1, **({} if many else {"maxItems": 1}), "items": items}


def parameters_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a function's parameters, or of an empty object without parameters."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters} if "type" not in parameters and "$ref" not in parameters else {**parameters}
