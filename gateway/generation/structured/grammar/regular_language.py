"""Regular languages: sets of texts, written as expressions with intersection.

A text is matched character by character with Brzozowski derivatives: `derivative(x, c)` has the
texts of `x` that begin with `c`, without this character.

The functions keep expressions in a normal form, because a language would otherwise have
infinitely many different derivatives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from llmops.gateway.generation.structured.grammar.compile_limits import spend_steps

Ranges = tuple[tuple[int, int], ...]
LAST_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


class RegularLanguage:
    """A set of texts. Create languages only with the functions below.

    Attributes:
        kind: The operation: chars, cat, any_of, all_of, repeat or multiples.
        parts: The operands.
        nullable: True if the empty text belongs to the language.
    """

    __slots__ = ("_hash", "kind", "nullable", "parts")

    def __init__(self, kind: str, parts: Any, nullable: bool) -> None:
        self.kind, self.parts, self.nullable = kind, parts, nullable
        self._hash = hash((kind, parts))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, RegularLanguage) or self._hash != other._hash:
            return False
        spend_steps()
        return self.kind == other.kind and bool(self.parts == other.parts)


#: Language without any text, and language of the empty text alone.
EMPTY_SET = RegularLanguage("any_of", frozenset(), False)
EMPTY_TEXT = RegularLanguage("all_of", frozenset(), True)


def chars(ranges: Iterable[tuple[int, int]]) -> RegularLanguage:
    """Return the language of one character of `ranges`, which are pairs of first and last code."""
    found = merge_ranges(ranges)
    return RegularLanguage("chars", found, False) if found else EMPTY_SET


def char(text: str) -> RegularLanguage:
    """Return the language of one character of `text`, in which `a-z` is a range."""
    found, at = [], 0
    while at < len(text):
        last = at + 2 if text[at + 1 : at + 2] == "-" and at + 2 < len(text) else at
        found.append((ord(text[at]), ord(text[last])))
        at = last + 1
    return chars(found)


def literal(text: str) -> RegularLanguage:
    """Return the language of `text` alone."""
    return concat(*(chars([(ord(one), ord(one))]) for one in text))


def any_word(texts: Iterable[str]) -> RegularLanguage:
    """Return the language of `texts`.

    Common beginnings are shared, so that a derivative examines only one branch of them.
    """
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text)
    return any_of(_prefix_tree(branch) for branch in by_first.values())


def _prefix_tree(texts: list[str]) -> RegularLanguage:
    if len(set(texts)) == 1:
        return literal(texts[0])
    least, most = min(texts), max(texts)
    shared = next((at for at, one in enumerate(least) if one != most[at]), len(least))
    return concat(literal(least[:shared]), any_word(text[shared:] for text in texts))


def concat(*parts: RegularLanguage) -> RegularLanguage:
    """Return the language of texts that consist of a text of each of `parts`, in this order."""
    result = EMPTY_TEXT
    for part in reversed(parts):
        result = _concat_pair(part, result)
    return result


def any_of(parts: Iterable[RegularLanguage]) -> RegularLanguage:
    """Return the union of `parts`."""
    found, ranges = set(), []
    flat = list(_flatten_parts("any_of", parts))
    spend_steps(len(flat))
    for part in flat:
        if part.kind == "chars":
            ranges += part.parts
        else:
            found.add(part)
    if ranges:
        found.add(chars(ranges))
    if len(found) == 1:
        return found.pop()
    return RegularLanguage("any_of", frozenset(found), any(part.nullable for part in found)) if found else EMPTY_SET


def all_of(parts: Iterable[RegularLanguage]) -> RegularLanguage:
    """Return the intersection of `parts`, of which there must be at least one."""
    found = set(_flatten_parts("all_of", parts))
    spend_steps(len(found))
    if EMPTY_SET in found:
        return EMPTY_SET
    if EMPTY_TEXT in found:
        return EMPTY_TEXT if all(part.nullable for part in found) else EMPTY_SET
    if len(found) == 1:
        return found.pop()
    return RegularLanguage("all_of", frozenset(found), all(part.nullable for part in found))


def repeat(part: RegularLanguage, least: int = 0, most: int | None = None) -> RegularLanguage:
    """Return `part` repeated `least` to `most` times; None as `most` means without an upper bound."""
    if most == 0 or part is EMPTY_TEXT or part is EMPTY_SET:
        return EMPTY_TEXT if least == 0 or part is EMPTY_TEXT or most == 0 else EMPTY_SET
    if (least, most) == (1, 1):
        return part
    return RegularLanguage("repeat", (part, least, most), least == 0 or part.nullable)


def optional(part: RegularLanguage) -> RegularLanguage:
    """Return the union of `part` and the language of the empty text."""
    return any_of((EMPTY_TEXT, part))


def multiples(step: int, rest: int = 0) -> RegularLanguage:
    """Return the language of the digits that complete a number to a multiple of `step`.

    `rest` is the remainder of the number before the digits.
    """
    return RegularLanguage("multiples", (step, rest), rest == 0)


def derivative(language: RegularLanguage, code: int) -> RegularLanguage:
    """Return the language of the texts that may follow the character `code` in `language`."""
    kind, parts = language.kind, language.parts
    if kind == "chars":
        return EMPTY_TEXT if _in_ranges(parts, code) else EMPTY_SET
    spend_steps()
    if kind == "cat":
        first, rest = parts
        taken = concat(derivative(first, code), rest)
        return any_of((taken, derivative(rest, code))) if first.nullable else taken
    if kind == "repeat":
        part, least, most = parts
        return concat(derivative(part, code), repeat(part, max(least - 1, 0), None if most is None else most - 1))
    if kind == "multiples":
        step, rest = parts
        return multiples(step, (rest * 10 + code - 48) % step) if 48 <= code <= 57 else EMPTY_SET
    if language is EMPTY_TEXT or not parts:
        return EMPTY_SET
    return (any_of if kind == "any_of" else all_of)([derivative(part, code) for part in parts])


def character_classes(language: RegularLanguage) -> list[list[tuple[int, int]]]:
    """Return all characters in sets, as ranges. `language` treats the characters of a set alike."""
    # By character: bit masks of the sets with a range that begins or ends there.
    changes: defaultdict[int, int] = defaultdict(int, {0: 0, LAST_CODE_POINT + 1: 0})
    for at, ranges in enumerate(_distinguished_ranges(language)):
        for low, high in ranges:
            changes[low] ^= 1 << at
            changes[high + 1] ^= 1 << at
    groups: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    inside = 0
    for low, above in pairwise(sorted(changes)):
        inside ^= changes[low]
        groups[inside].append((low, above - 1))
    return list(groups.values())


def _distinguished_ranges(language: RegularLanguage) -> Iterator[Ranges]:
    for part in _walk(language):
        if part.kind == "chars":
            spend_steps(len(part.parts) // 8)
            yield part.parts
        elif part.kind == "multiples":
            yield from (((digit, digit),) for digit in range(48, 58))


def _in_ranges(ranges: Ranges, code: int) -> bool:
    at = bisect_right(ranges, (code, LAST_CODE_POINT)) - 1
    return at >= 0 and code <= ranges[at][1]


def _concat_pair(first: RegularLanguage, rest: RegularLanguage) -> RegularLanguage:
    if first is EMPTY_SET or rest is EMPTY_SET:
        return EMPTY_SET
    if first is EMPTY_TEXT or rest is EMPTY_TEXT:
        return rest if first is EMPTY_TEXT else first
    if first.kind == "cat":
        spend_steps()
        return _concat_pair(first.parts[0], _concat_pair(first.parts[1], rest))
    return RegularLanguage("cat", (first, rest), first.nullable and rest.nullable)


def _flatten_parts(kind: str, parts: Iterable[RegularLanguage]) -> Iterator[RegularLanguage]:
    for part in parts:
        if part.kind == kind and part is not EMPTY_TEXT and part is not EMPTY_SET:
            yield from part.parts
        elif part is not EMPTY_SET or kind == "all_of":
            yield part


def _walk(language: RegularLanguage) -> Iterator[RegularLanguage]:
    seen: set[RegularLanguage] = set()
    stack = [language]
    while stack:
        part = stack.pop()
        spend_steps()
        if part not in seen:
            seen.add(part)
            yield part
            if part.kind in ("cat", "any_of", "all_of", "repeat"):
                stack.extend(inner for inner in part.parts if isinstance(inner, RegularLanguage))


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return `ranges` in order, with touching ranges merged."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        elif low <= high:
            found.append((low, high))
    spend_steps(len(found) // 2)
    return tuple(found)


def subtract_ranges(ranges: Iterable[tuple[int, int]], excluded: Iterable[tuple[int, int]]) -> Ranges:
    """Return `ranges` without the characters of `excluded`."""
    left, gaps, at = [], merge_ranges(excluded), 0
    for first, last in merge_ranges(ranges):
        while at < len(gaps) and gaps[at][1] < first:
            at += 1
        low = first
        while at < len(gaps) and gaps[at][0] <= last:
            left.append((low, gaps[at][0] - 1))
            low = gaps[at][1] + 1
            if low > last:
                break
            at += 1
        left.append((low, last))
    return merge_ranges(left)
