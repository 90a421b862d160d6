"""Rules on streams: what leaves does not depend on how the text arrives, and nothing of a match leaves in `hold`."""

import re
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.errors import InputError, MissingDependencyError
from llmops.gateway.safety.rules import RuleFilter, rule_filter, script_filter
from llmops.gateway.safety.stream_guard import SEARCH_STEP, RuleStage, StreamGuard

pytest.importorskip("re2")

#: Patterns in the syntax that RE2 and Python's `re` share, so that `re` is an independent judge of the whole text.
PATTERNS = [r"sk-[0-9a-f]{4,12}", r"\bpass\b", r"a{1,20}b", r"(?:x|xy|xyz){1,3}!", r"\b\d{3}-\d{2}-\d{4}\b"]
RULE = rule_filter("secrets", "secrets", PATTERNS, ["top secret", "pässwort"], ignore_case=False)
# RE2's classes are ASCII's; a listed word has no letter of any alphabet beside it
WHOLE = [re.compile("|".join(f"(?:{one})" for one in PATTERNS), re.ASCII)]
WHOLE += [re.compile(r"(?<!\w)(?:top secret|pässwort)(?!\w)")]

WORDS = ["sk-", "12ab", "cafe", "pass", "word", "a", "aaaa", "b", "x", "xyz", "123-45-", "6789", "top secret", "é"]
pieces = st.sampled_from([*WORDS, " ", "!", "\n"])
texts = st.lists(pieces, max_size=60).map("".join)


def first_match(text: str) -> re.Match[str] | None:
    return min(filter(None, (one.search(text) for one in WHOLE)), key=lambda found: found.span(), default=None)


def chunks(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def stream(rule: RuleFilter, mode: str, parts: list[str]) -> tuple[list[str], StreamGuard]:
    guard = StreamGuard([RuleStage(rule, mode)], lambda found, mode: None)
    left = []
    for at, part in enumerate(parts):
        left.append(guard.feed(part, final=at == len(parts) - 1))
        if guard.finding is not None:
            break
    return left, guard


@given(texts, st.lists(st.integers(0, 500), max_size=40))
def test_hold_lets_out_exactly_what_is_before_the_first_match(text, cuts):
    found = first_match(text)
    left, guard = stream(RULE, "hold", chunks(text, cuts))
    assert "".join(left) == (text if found is None else text[: found.start()])
    assert (guard.finding is not None) == (found is not None)


@given(texts, st.lists(st.integers(0, 500), max_size=40))
def test_cut_lets_out_no_more_than_its_window(text, cuts):
    found = first_match(text)
    parts = chunks(text, cuts)
    left, guard = stream(RULE, "cut", parts)
    assert (guard.finding is not None) == (found is not None)
    if found is None:
        assert "".join(left) == text
    else:
        longest = max(map(len, parts))
        assert text.startswith("".join(left))
        assert len("".join(left)) <= found.end() + SEARCH_STEP + longest


@given(texts, st.lists(st.integers(0, 500), max_size=40))
def test_observe_changes_nothing(text, cuts):
    found = []
    guard = StreamGuard([RuleStage(RULE, "observe")], lambda finding, mode: found.append((finding.category, mode)))
    parts = chunks(text, cuts)
    assert "".join([guard.feed(part, final=at == len(parts) - 1) for at, part in enumerate(parts)]) == text
    assert found == ([("secrets", "observe")] if first_match(text) else [])


def test_the_text_before_a_match_still_passes_the_other_filters():
    names = rule_filter("names", "names", [], ["Alice"], ignore_case=True)
    found = []
    stages = [RuleStage(rule, "hold") for rule in (RULE, names)]
    guard = StreamGuard(stages, lambda one, mode: found.append(one.category))
    text = "ask alice for sk-12ab now, or somebody else who knows it" + "." * SEARCH_STEP
    assert guard.feed(text, final=False) == "ask "
    assert found == ["secrets", "names"]


PROBLEMS = {"(a": "does not compile", "a*": "matches an empty text", r"(?<=x)a": "RE2 does not support"}
PROBLEMS |= {"ab+": r"write \{1,N\} instead of \+ and \*"}


def test_what_cannot_be_a_rule():
    problems = [([pattern], [], message) for pattern, message in PROBLEMS.items()]
    problems += [([], ["x" * 300], "300 characters"), ([], [" "], "neither patterns nor words")]
    for patterns, words, message in problems:
        with pytest.raises(InputError, match=message):
            rule_filter("mine", "mine", patterns, words, ignore_case=True)


def test_the_writing_system_of_an_answer():
    latin = script_filter("script", "script", ["latin"])
    assert latin.search("Ça va? 5 €, naïve – Привет is one word, ß too.") is None
    assert latin.search("The answer is สวัสดีครับ ผมชื่อ today") is not None
    assert latin.search("The answer is: это совсем другой язык") is not None
    both = script_filter("script", "script", ["latin", "cyrillic"])
    assert both.search("The answer is: это совсем другой язык") is None
    with pytest.raises(InputError, match="klingon"):
        script_filter("script", "script", ["klingon"])


def test_without_re2_the_filter_and_the_extra_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "re2", None)
    said = r"^The safety filter s needs RE2, which is not installed; .*safety"
    with pytest.raises(MissingDependencyError, match=said):
        rule_filter("s", "s", [], ["a"], ignore_case=False)


# of JSON, of JSON in JSON, of Python, and octal ones
ESCAPES = ["\\u{:04x}", "\\\\u{:04X}", "\\x{:02x}", "\\{:03o}"]
PARTS = st.sampled_from(["sk-12ab", "sk-", "12ab", "pass", " ", "x", "\n", "top secret"])
KINDS = st.lists(st.sampled_from(["{:c}", *ESCAPES]), min_size=1, max_size=40)


@given(st.lists(PARTS, max_size=12), KINDS, st.lists(st.integers(0, 10_000), max_size=12))
def test_a_stream_in_escapes_releases_nothing_of_a_match(parts, kinds, cuts):
    text = "".join(parts)
    shown = ["\\n" if one == "\n" else kinds[at % len(kinds)].format(ord(one)) for at, one in enumerate(text)]
    stage, released, found = RuleStage(RULE, "hold"), "", None
    for part, is_last in [*((one, False) for one in chunks("".join(shown), cuts)), ("", True)]:
        left, found = stage.feed(part, is_last)
        released += left
        if found is not None:
            break
    first = first_match(text)
    assert (found is None) == (first is None)
    assert released == "".join(shown if first is None else shown[: first.start()])
