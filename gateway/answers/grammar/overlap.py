"""Whether a value may be valid under two parts of a `oneOf`: then a grammar cannot promise that it is only one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from llmops.gateway.answers.grammar.merge import Flat, Schema, canonical, type_of, types_of
from llmops.gateway.answers.grammar.work import spend


def overlap(parts: Sequence[Schema], ways: Callable[[Schema], list[Flat]]) -> bool:
    """True unless it is plain that no two of `parts` allow the same value."""
    flats = [ways(part) for part in parts]
    pairs = itertools.combinations(flats, 2)
    return any(not _apart(one, other, ways) for left, right in pairs for one in left for other in right)


def _apart(one: Flat, other: Flat, ways: Callable[[Schema], list[Flat]]) -> bool:
    spend(5)
    left, right = _kinds(one), _kinds(other)
    if left is not None and right is not None and not left & right:
        return True
    if "enum" in one and "enum" in other:
        return not set(map(canonical, one["enum"])) & set(map(canonical, other["enum"]))
    if left == right == {"object"}:
        return _needs_more(one, other) or _needs_more(other, one) or _told_apart(one, other, ways)
    return False


def _kinds(flat: Flat) -> set[str] | None:
    if "enum" in flat:
        spend(len(flat["enum"]))
        found: set[str] | None = {type_of(value) for value in flat["enum"]}
    else:
        found = types_of(flat) or ({"object"} if "properties" in flat else None)
    return {"number" if kind == "integer" else kind for kind in found} if found else None


def _needs_more(one: Flat, other: Flat) -> bool:
    """`one` requires what the objects written for `other`, and those that are valid by it, cannot have."""
    spend(len(one.get("required", ())))
    closed = other.get("additionalProperties", True) is False and not other.get("patternProperties")
    return closed and any(name not in other.get("properties", {}) for name in one.get("required", ()))


def _told_apart(one: Flat, other: Flat, ways: Callable[[Schema], list[Flat]]) -> bool:
    """A property that one of them requires has other values in each."""
    spend(len(one.get("required", ())) + len(other.get("required", ())))
    for name in {*one.get("required", ()), *other.get("required", ())}:
        left, right = (_values(flat.get("properties", {}).get(name, True), ways) for flat in (one, other))
        if left is not None and right is not None and not left & right:
            return True
    return False


def _values(schema: Any, ways: Callable[[Schema], list[Flat]]) -> set[str] | None:
    flats = ways(schema)
    if not all("enum" in flat for flat in flats):
        return None
    return {canonical(value) for flat in flats for value in flat["enum"]}
