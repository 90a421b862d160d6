"""Regular expressions as languages.

Python's own parser parses the pattern. The pattern has the meaning of ECMAScript, as in JSON
Schema: `\\d`, `\\w` and `\\s` are ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from llmops.gateway.generation.structured.grammar.compile_limits import NotEnforceableError, spend_steps
from llmops.gateway.generation.structured.grammar.regular_language import (
    LAST_CODE_POINT,
    SURROGATES,
    RegularLanguage,
    any_of,
    chars,
    concat,
    merge_ranges,
    repeat,
    subtract_ranges,
)

Ranges = Sequence[tuple[int, int]]
#: Function that returns the forms of a pattern's characters in the text: the characters themselves,
#: or their forms in a JSON string.
CharacterEncoder = Callable[[Ranges], RegularLanguage]

_SETS: dict[Any, Ranges] = {
    sre.CATEGORY_DIGIT: [(48, 57)],
    sre.CATEGORY_WORD: [(48, 57), (65, 90), (95, 95), (97, 122)],
    sre.CATEGORY_SPACE: [(9, 13), (32, 32)],
}
_OPPOSITES = {
    sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT,
    sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD,
    sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
}
_STARTS = ([(sre.AT, sre.AT_BEGINNING)], [(sre.AT, sre.AT_BEGINNING_STRING)])
_ENDS = ([(sre.AT, sre.AT_END)], [(sre.AT, sre.AT_END_STRING)])
_ANY: Ranges = [(0, LAST_CODE_POINT)]


def raw_character(ranges: Ranges) -> RegularLanguage:
    """Return the language of one character of `ranges`, unescaped."""
    return chars(subtract_ranges(ranges, [SURROGATES]))


def regex_language(pattern: str, encode: CharacterEncoder, *, whole: bool = False) -> RegularLanguage:
    """Return the language of the texts that match `pattern`.

    A pattern without anchors, or with both, describes the whole text. A pattern with `^` alone
    describes the beginning of the text, and a pattern with `$` alone describes the end.

    Args:
        pattern: A regular expression.
        encode: Returns the forms of the pattern's characters in the texts.
        whole: True if the pattern describes the whole text, whatever its anchors.

    Raises:
        NotEnforceableError: The pattern is not a regular expression, or its language is not
            regular.
    """
    anything = repeat(encode(_ANY))

    def placed(starts: bool, inner: RegularLanguage, ends: bool) -> RegularLanguage:
        if whole or starts == ends:
            return inner
        return concat(inner, anything) if starts else concat(anything, inner)

    return any_of(placed(*_anchored(branch, encode)) for branch in _branches(parse_regex(pattern)))


def parse_regex(pattern: str) -> list[Any]:
    """Return the parsed pattern. Python's matcher is never run on clients' patterns.

    Raises:
        NotEnforceableError: The text is not a regular expression.
    """
    try:
        tree: Any = parser.parse(pattern)
        return list(tree)
    except (re.error, RecursionError, OverflowError) as error:
        raise NotEnforceableError(f"the pattern is not a regular expression: {error}") from None


def _branches(nodes: list[Any]) -> list[list[Any]]:
    """Return the alternatives of a pattern, each with its own anchors.

    Python's parser factors out a common beginning; the returned alternatives include the beginning.
    """
    spend_steps(len(nodes))
    for at in {0, len(nodes) - 1} if nodes else ():
        op, value = nodes[at]
        if op is sre.BRANCH and any(node[0] is sre.AT for branch in value[1] for node in branch):
            parts = ([*nodes[:at], *branch, *nodes[at + 1 :]] for branch in value[1])
            return [found for part in parts for found in _branches(part)]
    return [nodes]


def _anchored(nodes: list[Any], encode: CharacterEncoder) -> tuple[bool, RegularLanguage, bool]:
    """Return the language of a pattern without its anchors, between two booleans.

    The first boolean is True if the pattern begins with an anchor, and the second boolean is True
    if it ends with an anchor.
    """
    starts, ends = nodes[:1] in _STARTS, nodes[-1:] in _ENDS
    return starts, _sequence(nodes[starts : len(nodes) - ends], encode), ends


def _sequence(nodes: Any, encode: CharacterEncoder) -> RegularLanguage:
    return concat(*(_node(op, value, encode) for op, value in nodes))


def _node(op: Any, value: Any, encode: CharacterEncoder) -> RegularLanguage:
    if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
        return encode(_ranges(op, value))
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, inner = value
        return repeat(_sequence(inner, encode), least, None if most == sre.MAXREPEAT else most)
    if op is sre.SUBPATTERN:
        return _sequence(value[3], encode)
    if op is sre.BRANCH:
        return any_of(_sequence(branch, encode) for branch in value[1])
    raise NotEnforceableError(f"the pattern has an element that a grammar cannot express ({str(op).lower()})")


def _ranges(op: Any, value: Any) -> Ranges:
    if op is sre.LITERAL:
        return [(value, value)]
    if op is sre.ANY:
        return subtract_ranges(_ANY, [(10, 10), (13, 13)])
    if op is sre.NOT_LITERAL:
        return subtract_ranges(_ANY, [(value, value)])
    if op is sre.RANGE:
        return [value]
    if op is sre.CATEGORY:
        return _SETS[value] if value in _SETS else subtract_ranges(_ANY, _SETS[_OPPOSITES[value]])
    negated = value[0][0] is sre.NEGATE
    found = merge_ranges(part for item in value[negated:] for part in _ranges(*item))
    return subtract_ranges(_ANY, found) if negated else found
