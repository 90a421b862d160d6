"""Sets of texts as regular expressions with intersection, followed character by character.

Brzozowski derivatives: `after(x, c)` are the texts of `x` that begin with `c`, without it. The functions here keep
expressions in a normal form, without which there would be no end of different ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

Ranges = tuple[tuple[int, int], ...]
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


class Language:
    """`kind`: chars, cat, any_of, all_of, repeat or multiples, of `parts`. `nullable`: the empty text is in it."""

    __slots__ = ("_hash", "kind", "nullable", "parts")

    def __init__(self, kind: str, parts: Any, nullable: bool) -> None:
        self.kind, self.parts, self.nullable = kind, parts, nullable
        self._hash = hash((kind, parts))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = isinstance(other, Language) and self._hash == other._hash
        return same and self.kind == other.kind and self.parts == other.parts  # type: ignore[attr-defined]


NOTHING = Language("any_of", frozenset(), False)
EMPTY = Language("all_of", frozenset(), True)


def chars(ranges: Iterable[tuple[int, int]]) -> Language:
    """One character of `ranges` (first and last code, both in)."""
    merged = _merged(ranges)
    return Language("chars", merged, False) if merged else NOTHING


def char(text: str) -> Language:
    """One character of `text`, where `a-z` is a range."""
    found, at = [], 0
    while at < len(text):
        last = at + 2 if text[at + 1 : at + 2] == "-" and at + 2 < len(text) else at
        found.append((ord(text[at]), ord(text[last])))
        at = last + 1
    return chars(found)


def literal(text: str) -> Language:
    return cat(*(chars([(ord(one), ord(one))]) for one in text))


def words(texts: Iterable[str]) -> Language:
    """One of `texts`. What they begin with in common is said once, so that a step looks at one branch of them."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text)
    return any_of(_branch(branch) for branch in by_first.values())


def _branch(texts: list[str]) -> Language:
    if len(set(texts)) == 1:
        return literal(texts[0])
    least, most = min(texts), max(texts)
    shared = next((at for at, one in enumerate(least) if one != most[at]), len(least))
    return cat(literal(least[:shared]), words(text[shared:] for text in texts))


def cat(*parts: Language) -> Language:
    """One after the other."""
    result = EMPTY
    for part in reversed(parts):
        result = _pair(part, result)
    return result


def any_of(parts: Iterable[Language]) -> Language:
    """What is in at least one."""
    found, ranges = set(), []
    for part in _flat("any_of", parts):
        if part.kind == "chars":
            ranges += part.parts
        else:
            found.add(part)
    if ranges:
        found.add(chars(ranges))
    if len(found) == 1:
        return found.pop()
    return Language("any_of", frozenset(found), any(part.nullable for part in found)) if found else NOTHING


def all_of(parts: Iterable[Language]) -> Language:
    """What is in each of them; `parts` must not be none."""
    found = set(_flat("all_of", parts))
    if NOTHING in found:
        return NOTHING
    if EMPTY in found:
        return EMPTY if all(part.nullable for part in found) else NOTHING
    if len(found) == 1:
        return found.pop()
    return Language("all_of", frozenset(found), all(part.nullable for part in found))


def repeat(part: Language, least: int = 0, most: int | None = None) -> Language:
    """`part` again and again; `most` None: without end."""
    if most == 0 or part in (EMPTY, NOTHING):
        return EMPTY if least == 0 or part is EMPTY or most == 0 else NOTHING
    if (least, most) == (1, 1):
        return part
    return Language("repeat", (part, least, most), least == 0 or part.nullable)


def optional(part: Language) -> Language:
    return any_of((EMPTY, part))


def multiples(step: int, rest: int = 0) -> Language:
    """Digits of a number that is a multiple of `step` when `rest` stands before them."""
    return Language("multiples", (step, rest), rest == 0)


def after(language: Language, code: int) -> Language:
    """The derivative by a character."""
    kind, parts = language.kind, language.parts
    if kind == "chars":
        return EMPTY if any(low <= code <= high for low, high in parts) else NOTHING
    if kind == "cat":
        first, rest = parts
        taken = cat(after(first, code), rest)
        return any_of((taken, after(rest, code))) if first.nullable else taken
    if kind == "repeat":
        part, least, most = parts
        return cat(after(part, code), repeat(part, max(least - 1, 0), None if most is None else most - 1))
    if kind == "multiples":
        step, rest = parts
        return multiples(step, (rest * 10 + code - 48) % step) if 48 <= code <= 57 else NOTHING
    if language is EMPTY or not parts:
        return NOTHING
    return (any_of if kind == "any_of" else all_of)([after(part, code) for part in parts])


def alphabet(language: Language) -> list[tuple[int, int]]:
    """Ranges of characters that `language` never tells apart."""
    cuts = {0, LAST + 1}
    for part in _walk(language):
        if part.kind == "chars":
            cuts.update(edge for low, high in part.parts for edge in (low, high + 1))
        elif part.kind == "multiples":
            cuts.update(range(48, 59))
    ordered = sorted(cuts)
    return [(low, high - 1) for low, high in pairwise(ordered)]


def contains(language: Language, text: str) -> bool:
    for one in text:
        language = after(language, ord(one))
    return language.nullable


def _pair(first: Language, rest: Language) -> Language:
    if NOTHING in (first, rest):
        return NOTHING
    if first is EMPTY or rest is EMPTY:
        return rest if first is EMPTY else first
    if first.kind == "cat":
        return _pair(first.parts[0], _pair(first.parts[1], rest))
    return Language("cat", (first, rest), first.nullable and rest.nullable)


def _flat(kind: str, parts: Iterable[Language]) -> Iterator[Language]:
    for part in parts:
        if part.kind == kind and part is not EMPTY and part is not NOTHING:
            yield from part.parts
        elif part is not NOTHING or kind == "all_of":
            yield part


def _walk(language: Language) -> Iterator[Language]:
    seen: set[Language] = set()
    stack = [language]
    while stack:
        part = stack.pop()
        if part not in seen:
            seen.add(part)
            yield part
            if part.kind in ("cat", "any_of", "all_of", "repeat"):
                stack.extend(inner for inner in part.parts if isinstance(inner, Language))


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        elif low <= high:
            merged.append((low, high))
    return tuple(merged)
