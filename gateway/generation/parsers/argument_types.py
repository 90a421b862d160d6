"""The types of tool-call arguments that a model writes as bare text, from the function's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from llmops.gateway.generation.structured.schema_references import resolve_references

_MAX_DEPTH = 16
#: Maximum length of a Python literal in characters. Each takes about two microseconds of the event
#: loop, many times what JSON takes.
_MAX_PYTHON_CHARACTERS = 2**15
_NAMES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}

JsonTypes = frozenset[str] | None


def parameter_types(parameters: Mapping[str, Any] | None, name: str, known: dict[int, JsonTypes]) -> JsonTypes:
    """Return the JSON types that parameter `name` may have; None if the schema does not say.

    Args:
        parameters: The schema of the function's parameters.
        name: The name of the parameter.
        known: The types found so far in schemas that still exist, by the schema's `id`. A schema is
            read once, because references can repeat a part of it any number of times.
    """
    root = parameters or {}
    properties = resolve_references(root, root).get("properties")
    return _schema_types(properties.get(name), root, 0, known) if isinstance(properties, Mapping) else None


def _schema_types(schema: object, root: Mapping[str, Any], depth: int, known: dict[int, JsonTypes]) -> JsonTypes:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    schema = resolve_references(schema, root)
    if not schema:
        return None
    if id(schema) not in known:
        known[id(schema)] = None  # for a schema that contains itself
        known[id(schema)] = _read_types(schema, root, depth, known)
    return known[id(schema)]


def _read_types(
    schema: Mapping[str, Any], root: Mapping[str, Any], depth: int, known: dict[int, JsonTypes]
) -> JsonTypes:
    given = schema.get("type")
    if given is not None:
        # A schema that is not compiled to a grammar was not validated.
        return frozenset(one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)) or None
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(_NAMES[type(value)] for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            branches = [_schema_types(branch, root, depth + 1, known) for branch in schema[key]]
            found = [kinds for kinds in branches if kinds is not None]
            return frozenset().union(*found) if len(found) == len(branches) else None
    parts = schema.get("allOf")
    whole = [_schema_types(one, root, depth + 1, known) for one in parts] if isinstance(parts, list) else []
    return next((kinds for kinds in whole if kinds is not None), None)


def to_argument_json(text: str, kinds: JsonTypes) -> str:
    """Return an argument as JSON: with an allowed type if the text has one, otherwise as a string."""
    bare = text.strip()
    try:
        value = parse_literal(bare)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        return json.dumps(text, ensure_ascii=False)
    kind = _NAMES.get(type(value), "")
    fits = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds) or "string" not in kinds
    return written if fits and kind != "string" else json.dumps(text, ensure_ascii=False)


def parse_literal(source: str) -> object:
    """Return the value of JSON or Python text: models mix up `true` and `True`.

    Raises:
        ValueError: The text is neither JSON nor a Python literal.
    """
    if source.lower() in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(source.lower())
    for read in (json.loads, ast.literal_eval) if len(source) <= _MAX_PYTHON_CHARACTERS else (json.loads,):
        try:
            return read(source)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise ValueError(f"the text is neither JSON nor a Python literal: {source[:40]}")
