"""Regular expressions character by character and anchor by anchor; Python's own matcher is the judge."""

import itertools
import re

import pytest

from llmops.gateway.generation.structured.grammar import NotEnforceableError
from llmops.gateway.generation.structured.grammar.regex_parser import raw_character, regex_language
from llmops.gateway.generation.structured.grammar.regular_language import LAST_CODE_POINT
from tests.support.regular_languages import contains

CODES = [*range(0x180), 0x2027, 0xD7FF, 0xE000, 0xFFFF, 0x10000, LAST_CODE_POINT]
SETS = [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "a", "[^a]", "[^a-c_]", r"[\d.]", r"[^\d.]", r"[\D5]", r"[^\W_]"]


@pytest.mark.parametrize("one", SETS)
def test_the_characters_of_a_set(one):
    language, judge = regex_language(one, raw_character), re.compile(one, re.ASCII)
    assert [code for code in CODES if contains(language, chr(code)) != (judge.fullmatch(chr(code)) is not None)] == []


def test_a_dot_is_none_of_ecmas_line_ends():
    dot = regex_language(".", raw_character)
    assert [code for code in CODES if not contains(dot, chr(code))] == [10, 13]


# each with the expression that a whole text must match: what is anchored at one side may go on at the other
ANCHORED = {
    "": "", "^": ".*", "$": ".*", "^$": "", "a": "a", "^a": "a.*", "a$": ".*a", "^a$": "a", "^ab|b": "ab.*|b",
    "ab|ac$": "ab|.*ac", "a(?:b|c$)": "ab|.*ac", "(?:^a|b)c": "ac.*|bc", "^(?:a|bc)$": "a|bc", "^a|^b|c$": "[ab].*|.*c",
    "(?:^a|b)(?:a|c$)": "aa.*|ac|ba|.*bc", "^|b$": ".*", r"\Aa|b\Z": "a.*|.*b", "^(a|b)+?c{2,}$": "(a|b)+c{2,}",
    "^a{2,3}$": "a{2,3}", "^a*$": "a*", "^(?:ab){0,2}c?$": "(?:ab){0,2}c?",
}  # fmt: skip
TEXTS = ["".join(letters) for size in range(5) for letters in itertools.product("abc", repeat=size)]


@pytest.mark.parametrize("pattern", ANCHORED)
def test_anchors_wherever_they_stand(pattern):
    language = regex_language(pattern, raw_character)
    right = [one for one in TEXTS if re.fullmatch(ANCHORED[pattern], one)]
    assert [one for one in TEXTS if contains(language, one)] == right


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "not a regular expression: missing \\)"),
        ("(" * 5000 + ")" * 5000, "not a regular expression: maximum recursion"),
        ("a{99999999999999999999}", "not a regular expression: the repetition number is too large"),
        ("(a)\\1", r"an element that a grammar cannot express \(groupref\)"),
        ("a^b", r"an element that a grammar cannot express \(at\)"),
    ],
)
def test_what_is_not_regular_is_refused(pattern, says):
    with pytest.raises(NotEnforceableError, match=says):
        regex_language(pattern, raw_character)
