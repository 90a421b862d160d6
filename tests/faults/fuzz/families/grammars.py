"""EBNF texts, regular expressions and choices that are slow to read or to compile, or broken."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.faults.fuzz.base import Case, Target, chat
from tests.faults.fuzz.families.schemas import PATTERNS

OPENINGS = (
    "[",
    "[^",
    '"',
    '"\\',
    "{",
    "(",
    "'",
    "#",
    "a",
    "a ",
    "a::=",
    "\\",
    "|",
    "[a",
    '["',
    "{1,",
    "é",
    "::=",
    "\n",
    "((a)",
    '"x"',
    "]",
)
_RULES = (
    'root ::= "a"', "root ::= [a-z]{1,20}", 'root ::= ("a" | "b")* "c"', 'root ::= x\nx ::= "y" x | ""',
    "root ::= [^\\]]+ # all", "root ::= root", "root ::= a b\na ::= b\nb ::= a", 'root ::= ""',
    "root ::= [z-a]", 'root ::= "a"{3,1}', "root ::= x{99999}",
)  # fmt: skip


def cases(target: Target, chance: random.Random) -> Iterator[Case]:
    while True:
        field, value = chance.choice((_grammar, _grammar, _regex, _choice))(chance)
        asked = (
            {field: value} if chance.random() < 0.7 else {"structured_outputs": {field.removeprefix("guided_"): value}}
        )
        yield chat(target, **asked)


def _grammar(chance: random.Random) -> tuple[str, Any]:
    if chance.random() < 0.5:
        count = chance.choice((50, 5_000, 30_000, 60_000))
        body = chance.choice(OPENINGS) * (count // 2) + chance.choice(OPENINGS) * (count // 8)
        return "guided_grammar", f"root ::= {body}"
    text = chance.choice(_RULES)
    if chance.random() < 0.5:
        at = chance.randrange(len(text))
        text = text[:at] + chance.choice(OPENINGS) + text[at + chance.randrange(2) :]
    if chance.random() < 0.3:
        text += "".join(f'\nr{at} ::= r{at + 1} | "{at}"' for at in range(900)) + '\nr900 ::= "x"'
    return "guided_grammar", text


def _regex(chance: random.Random) -> tuple[str, Any]:
    text = chance.choice(PATTERNS)
    if chance.random() < 0.5:
        text = chance.choice(("(?:{0}|{1})*", "{0}{1}", "^{0}|{1}$", "({0}){{2,9}}{1}")).format(
            text, chance.choice(PATTERNS)
        )
    return "guided_regex", text


def _choice(chance: random.Random) -> tuple[str, Any]:
    count = chance.choice((0, 1, 300, 1024, 1025))
    return "guided_choice", [
        chance.choice(("", "a" * at, f"{at * 7919 % 1009}", "\x00", "\ud800", 'a"\\'))
        if chance.random() < 0.02
        else f"c{at}"
        for at in range(count)
    ]
