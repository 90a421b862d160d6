"""Bounds of the time that a tokenizer's regular expressions take.

Oniguruma, which `tokenizers` uses, finds matches by backtracking: an expression such as
`(?:ab)*(?:ab)*(?:ab)*y` takes seconds for a text of a kilobyte, and no limit of time can be set. No
set of sample texts finds all such expressions, because the slow texts may be the only slow ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

#: Number of times that an item without a limit is assumed to repeat in a text: once for each
#: character of the longest text that the gateway tokenizes on its event loop.
_REPEATS = 4096
#: Maximum number of steps that the expressions of a quick tokenizer may take together at a place in
#: a text. Known tokenizers need up to 12 times `_REPEATS`: that of Command A, for groups of digits.
_MAX_STEPS = 16 * _REPEATS
#: Number of steps that stands for any larger number.
_MANY = 2**40
#: Maximum length of an expression that is examined, in characters. Known tokenizers have up to 600.
_MAX_LENGTH = 4096

#: Pattern of the parts of an expression that Oniguruma and Python read alike. The first group is a
#: single character or a class of characters, and the second is an assertion or an operator.
_PARTS = re.compile(
    r"(\\[pP]\{\^?\w+\}|\\[sSdDwWrntfv]|\\u[0-9a-fA-F]{4}|\\[^\w]"
    r"|\[\^?(?:\\.|[^\[\]\\]|\[\^?:?(?:\\.|[^\[\]\\])+\])+\]|[^\\\[\](){}|?*+^$])"
    r"|(\\[bB]|[|^$)]|\((?:\?(?:i?:|<?[=!]|>))?(?!\?)|(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\}(?![*+?]))[+?]?)",
    re.DOTALL,
)


class _Effort(NamedTuple):
    """Upper bounds of the effort that a part of an expression takes at a place in a text.

    Attributes:
        ways: The number of ways in which the part can match.
        steps: The number of steps until all ways are tried.
        first_steps: The number of steps until the part matches, or fails.
        may_fail: False if the part matches everywhere, if only an empty text.
    """

    ways: int
    steps: int
    first_steps: int
    may_fail: bool


def are_quick(patterns: Iterable[str]) -> bool:
    """Return True if regular expressions are known to be quick in every text of the event loop.

    The expressions of known tokenizers are. The answer may be False for others that are quick, too.
    """
    return sum(map(_steps_at_place, patterns)) <= _MAX_STEPS


def _steps_at_place(pattern: str) -> int:
    """Return the maximum number of steps until an expression matches or fails at a place in a text."""
    parts = list(_PARTS.finditer(pattern)) if len(pattern) <= _MAX_LENGTH else []
    if sum(len(part[0]) for part in parts) != len(pattern):
        return _MANY
    try:
        # Which character it is makes no difference to the bound.
        parsed = parser.parse("".join("." if part[1] else part[2] for part in parts))
    except (re.error, RecursionError, OverflowError):
        return _MANY
    return _sequence(parsed, False).first_steps


def _sequence(items: Iterable[Any], ignore_case: bool) -> _Effort:
    found = [_item(operator, value, ignore_case) for operator, value in items]
    # After the last part that may fail, no other way of the parts before is tried.
    last = max((at for at, one in enumerate(found) if one.may_fail), default=-1)
    ways, steps, first_steps = 1, 0, 0
    for at, one in enumerate(found):
        steps += ways * one.steps
        first_steps += ways * one.steps if at < last else ways * one.first_steps if at == last else one.first_steps
        ways *= one.ways
    return _bounded(ways, steps, first_steps, last >= 0)


def _item(operator: Any, value: Any, ignore_case: bool) -> _Effort:
    if operator is sre.ANY:
        # Without regard to case, a character may stand for one or two in the text, as `ß` for `ss`.
        return _Effort(1 + ignore_case, 1, 1, True)
    if operator is sre.AT:
        return _Effort(1, 1, 1, True)
    if operator is sre.SUBPATTERN:
        return _sequence(value[3], ignore_case or bool(value[1] & re.IGNORECASE))
    if operator is sre.BRANCH:
        branches = [_sequence(one, ignore_case) for one in value[1]]
        return _bounded(
            ways=sum(one.ways for one in branches),
            steps=sum(one.steps for one in branches),
            first_steps=sum(one.first_steps for one in branches),
            may_fail=all(one.may_fail for one in branches),
        )
    if operator in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        least, most, body = value[0], min(value[1], value[0] + _REPEATS), _sequence(value[2], ignore_case)
        if most > 2 * _REPEATS:
            return _UNKNOWN
        return _bounded(
            ways=(most - least + 1) * body.ways**most,
            steps=most * body.steps * body.ways**most,
            first_steps=max(least, 1) * body.first_steps * body.ways ** max(least - 1, 0),
            may_fail=least > 0 and body.may_fail,
        )
    if operator in (sre.ASSERT, sre.ASSERT_NOT):
        direction, body = value[0], _sequence(value[1], ignore_case)
        # An assertion that looks back begins at each place where its part may begin.
        steps = body.steps * (body.ways if direction < 0 else 1)
        return _bounded(1, steps, steps, True)
    return _UNKNOWN


def _bounded(ways: int, steps: int, first_steps: int, may_fail: bool) -> _Effort:
    return _Effort(min(ways, _MANY), min(steps, _MANY), min(first_steps, _MANY), may_fail)


#: Effort of a part that is not examined, such as a reference to another part.
_UNKNOWN = _Effort(_MANY, _MANY, _MANY, True)
