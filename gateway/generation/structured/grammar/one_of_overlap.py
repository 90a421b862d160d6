"""Whether a value may be valid under two parts of a `oneOf`: then a grammar cannot promise that it is only one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from llmops.gateway.generation.structured.grammar.schema_merge import (
    FlatSchema,
    Schema,
    allowed_types,
    canonical_json,
    json_type,
)
from llmops.gateway.generation.structured.grammar.work_budget import spend_steps


def may_overlap(parts: Sequence[Schema], ways: Callable[[Schema], list[FlatSchema]]) -> bool:
    """True unless it is plain that no two of `parts` allow the same value."""
    flats = [ways(part) for part in parts]
    pairs = itertools.combinations(flats, 2)
    return any(not _are_disjoint(one, other, ways) for left, right in pairs for one in left for other in right)


def _are_disjoint(one: FlatSchema, other: FlatSchema, ways: Callable[[Schema], list[FlatSchema]]) -> bool:
    spend_steps(5)
    left, right = _kinds(one), _kinds(other)
    if left is not None and right is not None and not left & right:
        return True
    if "enum" in one and "enum" in other:
        return not set(map(canonical_json, one["enum"])) & set(map(canonical_json, other["enum"]))
    if left == right == {"object"}:
        return _needs_more(one, other) or _needs_more(other, one) or _has_discriminator(one, other, ways)
    return False


def _kinds(flat: FlatSchema) -> set[str] | None:
    if "enum" in flat:
        spend_steps(len(flat["enum"]))
        found: set[str] | None = {json_type(value) for value in flat["enum"]}
    else:
        found = allowed_types(flat) or ({"object"} if "properties" in flat else None)
    return {"number" if kind == "integer" else kind for kind in found} if found else None


def _needs_more(one: FlatSchema, other: FlatSchema) -> bool:
    """`one` requires what the objects written for `other`, and those that are valid by it, cannot have."""
    spend_steps(len(one.get("required", ())))
    closed = other.get("additionalProperties", True) is False and not other.get("patternProperties")
    return closed and any(name not in other.get("properties", {}) for name in one.get("required", ()))


def _has_discriminator(one: FlatSchema, other: FlatSchema, ways: Callable[[Schema], list[FlatSchema]]) -> bool:
    """A property that one of them requires has other values in each."""
    spend_steps(len(one.get("required", ())) + len(other.get("required", ())))
    for name in {*one.get("required", ()), *other.get("required", ())}:
        left, right = (_values(flat.get("properties", {}).get(name, True), ways) for flat in (one, other))
        if left is not None and right is not None and not left & right:
            return True
    return False


def _values(schema: Any, ways: Callable[[Schema], list[FlatSchema]]) -> set[str] | None:
    flats = ways(schema)
    if not all("enum" in flat for flat in flats):
        return None
    return {canonical_json(value) for flat in flats for value in flat["enum"]}
