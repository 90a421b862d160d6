"""JSON Schemas from clients: checked before any engine sees them, and put together for forced tool calls.

The checks keep out what a grammar compiler would choke on (size, depth, dangling or circular references)
and say which part is wrong; what is enforced, and what cannot be, is up to the grammar (`grammar/`).
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
from llmops.gateway.generation.structured.grammar.errors import NotEnforceableError
from llmops.gateway.generation.structured.grammar.json_pointer import resolve_pointer
from llmops.gateway.generation.structured.grammar.regex_parser import parse_regex
from llmops.gateway.settings import RequestLimits

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_SCHEMA_KEYWORDS = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "additionalItems",
)
_SCHEMA_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNT_KEYWORDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_RANGE_KEYWORDS = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minimum", "maximum"),
    ("exclusiveMinimum", "exclusiveMaximum"),
)
_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_REFERENCE_CHAIN = 32
# `{5}`, `{5,}` and the 5 of `{2,5}`
_REPETITION = re.compile(r"(?<={)\d+(?=,?})|(?<=,)\d+(?=})")
# look-around, back references, word boundaries, Unicode classes, inline flags
_UNSUPPORTED = re.compile(r"\\[bBAZzkpP1-9]|\(\?(?!:)[^)]{0,2}")


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """How much a client may ask a grammar compiler to do. Sizes in characters of compact JSON, or of the pattern.

    `grammar`: one is made of the schema; else it is only shown to the model, and lengths, counts and patterns are free.
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
        return cls(size=limits.schema_bytes, choices=limits.choices)


DEFAULT_LIMITS = SchemaLimits()


def validate_schema(schema: object, param: str, limits: SchemaLimits = DEFAULT_LIMITS) -> str:
    """`schema` as compact JSON text, the key order kept: the order in which properties are generated."""
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(f"'{param}' must be a JSON Schema: an object.", param=param)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"'{param}' is not valid JSON: {error}.", param=param) from None
    problem = _problem(text, limits)
    if problem:
        raise InvalidRequestError(f"'{param}' cannot be used as a JSON Schema: {problem}.", param=param)
    return text


@lru_cache(maxsize=512)
def _problem(text: str, limits: SchemaLimits) -> str | None:
    if len(text) > limits.size:
        return f"it has {len(text)} characters, the limit is {limits.size}"
    root = json.loads(text)
    target_of = lru_cache(maxsize=None)(lambda reference: resolve_pointer(root, reference))
    repeats = 0
    try:
        for count, (place, node) in enumerate(_subschemas(root), start=1):
            if count > limits.nodes:
                return f"it has more than {limits.nodes} parts"
            if place.depth > limits.depth:
                return f"it is nested deeper than {limits.depth} levels"
            problem = _node_problem(node, target_of, limits)
            if problem:
                return f"{problem} at '{place}'"
            repeats += _repeats(node)
            if limits.grammar and repeats > limits.all_repeats:
                return f"its lengths and counts add up to more than {limits.all_repeats}"
    except _KeywordTypeError as error:
        return str(error)
    return None


class _KeywordTypeError(Exception):
    """A keyword has the wrong kind of value."""


class _SchemaLocation(NamedTuple):
    """Where a schema stands. Its path is written only for an error: a key may be long, and above thousands of parts."""

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
    """Every schema inside `root` with its place, depth first and without recursion."""
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
        for at, child in enumerate(_typed(node, key, list, place)):
            yield (key, at), child
    if isinstance(node.get("items"), list):
        for at, child in enumerate(node["items"]):
            yield ("items", at), child
    for key in _SCHEMA_MAP_KEYWORDS:
        for name, child in _typed(node, key, dict, place).items():
            yield (key, name), child


def _typed(node: Mapping[str, Any], key: str, kind: type, place: _SchemaLocation) -> Any:
    value = node.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise _KeywordTypeError(f"'{key}' must be {'a list' if kind is list else 'an object'} at '{place}'")
    return value


def _node_problem(node: object, target_of: Callable[[str], object], limits: SchemaLimits) -> str | None:
    if isinstance(node, bool):
        return None if node else "a schema that is false allows nothing"
    if not isinstance(node, dict):
        return "a schema must be an object or a boolean"
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _type_problem(node),
        lambda: _kind_problem(node),
        lambda: _reference_problem(node, target_of),
        lambda: _value_problem(node),
        lambda: _count_problem(node, limits),
        lambda: _pattern_problem(node, limits) if limits.grammar else None,
    )
    return next((problem for check in checks if (problem := check())), None)


def _type_problem(node: Mapping[str, Any]) -> str | None:
    kinds = node.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    wrong = next((kind for kind in kinds if not isinstance(kind, str) or kind not in _TYPES), None)
    return None if wrong is None else f"{json.dumps(wrong)} is not a type (use one of {', '.join(sorted(_TYPES))})"


def _kind_problem(node: Mapping[str, Any]) -> str | None:
    for key in (*_SCHEMA_KEYWORDS, "unevaluatedProperties", "unevaluatedItems"):
        if not isinstance(node.get(key), bool | dict | None) and not (key == "items" and isinstance(node[key], list)):
            return f"'{key}' must be a schema: an object or a boolean"
    for key in _NUMBER_KEYWORDS:
        if isinstance(node.get(key), bool) or not isinstance(node.get(key), int | float | None):
            return f"'{key}' must be a number"
    if not isinstance(node.get("patternProperties"), dict | None):
        return "'patternProperties' must be an object"
    if not isinstance(node.get("format"), str | None):
        return "'format' must be a text"
    return None


def _value_problem(node: Mapping[str, Any]) -> str | None:
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
            return f"'{key}' is {value}, the limit is {limits.repeats}"
    return next((problem for pair in _RANGE_KEYWORDS if (problem := _pair_problem(node, *pair))), None)


def _pair_problem(node: Mapping[str, Any], low: str, high: str) -> str | None:
    """Of two that are numbers, if they are there."""
    least, most = node.get(low), node.get(high)
    if least is None or most is None:
        return None
    return f"'{low}' {least} is more than '{high}' {most}" if least > most else None


def _repeats(node: object) -> int:
    """What a grammar compiler pays for: it writes out each repetition."""
    if not isinstance(node, dict):
        return 0
    counts = max((node[key] for key in _COUNT_KEYWORDS if isinstance(node.get(key), int)), default=0)
    return int(counts) + sum(map(_pattern_repeats, _patterns(node)))


def _patterns(node: Mapping[str, Any]) -> list[str]:
    pattern, names = node.get("pattern"), node.get("patternProperties")
    return [*([pattern] if isinstance(pattern, str) else []), *(names if isinstance(names, dict) else ())]


def _pattern_repeats(pattern: str) -> int:
    """Repetitions may be nested, so they multiply. Of a number the first digits say enough."""
    return math.prod(int(count.lstrip("0")[:10] or 1) for count in _REPETITION.findall(pattern))


def _pattern_problem(node: Mapping[str, Any], limits: SchemaLimits) -> str | None:
    if node.get("pattern") is not None and (problem := pattern_problem(node["pattern"], limits)):
        return problem
    for name in node.get("patternProperties") or ():
        if problem := _size_problem(name, limits) or _syntax_problem(name):
            return f"'patternProperties': {problem}"
    return None


def pattern_problem(pattern: object, limits: SchemaLimits = DEFAULT_LIMITS) -> str | None:
    """What is wrong with a regular expression, if anything; repetition counts are limited like any other."""
    if not isinstance(pattern, str) or not pattern:
        return "a pattern must be a text that is not empty"
    if problem := _size_problem(pattern, limits):
        return problem
    if unknown := _UNSUPPORTED.search(pattern.replace(r"\\", "")):
        return f"the pattern uses {unknown[0]}, which grammars cannot express"
    return _syntax_problem(pattern)


def _size_problem(pattern: str, limits: SchemaLimits) -> str | None:
    if "\0" in pattern:
        # to the engine's grammar library it is the end of the text: it would see another pattern, or none and crash
        return "a pattern cannot have the character U+0000"
    if len(pattern) > limits.pattern:
        return f"the pattern has {len(pattern)} characters, the limit is {limits.pattern}"
    if _pattern_repeats(pattern) > limits.repeats:
        return f"the pattern repeats something more than {limits.repeats} times"
    return None


def _syntax_problem(pattern: str) -> str | None:
    try:
        parse_regex(pattern)
    except NotEnforceableError as error:
        return str(error)
    return None


def _reference_problem(node: Mapping[str, Any], target_of: Callable[[str], object]) -> str | None:
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
            target = target_of(reference)
        except (KeyError, IndexError, ValueError, TypeError):
            return f"'$ref' {reference} leads nowhere"
    return None


def resolve_references(node: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `node` stands for once its references are followed; empty where they lead nowhere."""
    for _ in range(16):
        if not isinstance(node.get("$ref"), str):
            return node
        try:
            node = resolve_pointer(root, node["$ref"])
        except (KeyError, IndexError, ValueError, TypeError):
            break
        if not isinstance(node, Mapping):
            break
    return {}


def rebase_references(schema: object, place: str) -> object:
    """A copy of `schema` whose references still hold when it stands at JSON pointer `place` of a larger one."""
    if isinstance(schema, list):
        return [rebase_references(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: rebase_references(value, place) for key, value in schema.items() if key not in ("$schema", "$id")}
    if isinstance(schema.get("$ref"), str):
        copy["$ref"] = place + schema["$ref"][1:]
    return copy


def tool_calls_schema(functions: Sequence[tuple[str, Mapping[str, Any] | None]], many: bool) -> dict[str, Any]:
    """The schema of a list of calls of `functions` (name, parameters): at least one, and at most one unless `many`."""
    call: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for at, (name, parameters) in enumerate(functions):
        definitions[f"f{at}"] = rebase_references(parameters_schema(parameters), f"#/$defs/f{at}")
        call.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/f{at}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    items = call[0] if len(call) == 1 else {"anyOf": call}
    return {"$defs": definitions, "type": "array", "minItems": 1, **({} if many else {"maxItems": 1}), "items": items}


def parameters_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A function's parameters; without any, an empty object."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters} if "type" not in parameters and "$ref" not in parameters else {**parameters}
