"""References inside JSON Schemas: JSON pointers such as `#/$defs/a`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Errors of `resolve_pointer` for a pointer without a target.
POINTER_ERRORS = (LookupError, ValueError, TypeError)

#: Maximum number of references that `resolve_references` follows, so that a circular chain ends.
_MAX_CHAIN = 16


def resolve_pointer(root: object, reference: str) -> Any:
    """Return the part of `root` that `reference` points to.

    Raises:
        POINTER_ERRORS: The part does not exist.
    """
    target: Any = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        target = target[int(name)] if isinstance(target, list) else target[name]
    return target


def resolve_references(node: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that `node` refers to, or `node` itself without a reference.

    The result is an empty schema if the reference has no target.
    """
    for _ in range(_MAX_CHAIN):
        if not isinstance(node.get("$ref"), str):
            return node
        try:
            node = resolve_pointer(root, node["$ref"])
        except POINTER_ERRORS:
            break
        if not isinstance(node, Mapping):
            break
    return {}


def rebase_references(schema: object, place: str) -> object:
    """Return a copy of `schema` with references that are valid inside a larger schema.

    `place` is the JSON pointer of the copy in the larger schema.
    """
    if isinstance(schema, list):
        return [rebase_references(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: rebase_references(value, place) for key, value in schema.items() if key not in ("$schema", "$id")}
    if isinstance(schema.get("$ref"), str):
        copy["$ref"] = place + schema["$ref"][1:]
    return copy
