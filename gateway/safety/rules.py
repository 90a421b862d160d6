"""Filters of regular expressions, word lists and writing systems, matched in linear time by RE2.

A match has a maximum width, which makes a stream safe to filter: a character may be released once
the text after it is longer than the widest match, because a match that begins at the character
would have been found.

Tool calls and structured answers are JSON, in which `\\u0073k-1` means `sk-1`. Rules therefore also
search a text with its escapes replaced, and map matches back to their places in the original text.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import NamedTuple, TypeVar

from llmops.distribution import missing_extra
from llmops.errors import InputError
from llmops.gateway.safety.filters import JUDGED_TENANT, Finding, TextFilter
from llmops.gateway.text.text_thread_pool import INLINE_CHARACTERS, ThreadLane

T = TypeVar("T")

#: Maximum width of a rule's match, in characters. An answer's text is delayed by the width of the
#: widest rule of its policy.
MAX_WIDTH = 256

#: Supported writing systems, by RE2's names. Characters of no particular system, such as digits and
#: spaces, are always allowed.
SCRIPTS = frozenset(
    ["Arabic", "Armenian", "Bengali", "Bopomofo", "Cyrillic", "Devanagari", "Ethiopic", "Georgian", "Greek",
     "Gujarati", "Gurmukhi", "Han", "Hangul", "Hebrew", "Hiragana", "Kannada", "Katakana", "Khmer", "Lao", "Latin",
     "Malayalam", "Mongolian", "Myanmar", "Oriya", "Sinhala", "Tamil", "Telugu", "Thai", "Tibetan"]
)  # fmt: skip

#: Number of consecutive letters of other writing systems that make a finding: shorter runs, such as
#: a quoted word, are allowed. Up to three characters that are not letters may stand between two
#: letters.
FOREIGN_LETTERS = 8

#: Pattern of an escape in JSON or Python. A text that is JSON within JSON has several backslashes.
_ESCAPE = re.compile(
    r"\\{1,8}(?:u([dD][89abAB][0-9a-fA-F]{2})\\{1,8}u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})"
    r"|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([0-7]{1,3})|([nrtbfv\"'/]))"
)
#: Pattern of an incomplete escape at the end of a text that continues.
_ESCAPE_BEGUN = re.compile(
    r"\\{1,8}(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\{1,8}(?:u[0-9a-fA-F]{0,3})?)?"
    r"|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?|[0-7]{0,2})\Z"
)
#: Threads that search texts of more than INLINE_CHARACTERS, for which tenants take turns. With two
#: thousand words, RE2 takes up to 2.7 s for a million characters, so that longer texts have a thread
#: of their own.
_lane, _long_lane = ThreadLane("llmops-rules", 1), ThreadLane("llmops-long-rules", 1)
_LONG_CHARACTERS = 2**16
#: Length of the longest escape, in characters.
MAX_ESCAPE = 26
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v"}

#: Pattern of a character that is not part of a word.
_NO_WORD = r"[^\p{L}\p{M}\p{N}_]"


class Span(NamedTuple):
    """A match in a text.

    Attributes:
        start: The index of the first character.
        end: The index after the last character.
    """

    start: int
    end: int


class _PlainText(NamedTuple):
    """A text with its escapes replaced.

    Attributes:
        text: The text, without an incomplete escape at its end.
        starts: The index of each character in the original text, then the length of the original
            text.
    """

    text: str
    starts: list[int]


def _without_escapes(text: str) -> _PlainText:
    begun = _ESCAPE_BEGUN.search(text, max(0, len(text) - MAX_ESCAPE))
    end = begun.start() if begun else len(text)
    parts: list[str] = []
    starts: list[int] = []
    at = 0
    for found in _ESCAPE.finditer(text, 0, end):
        parts += text[at : found.start()], _character(found)
        starts += range(at, found.start() + 1)
        at = found.end()
    return _PlainText("".join([*parts, text[at:end]]), [*starts, *range(at, end), end])


def _character(escape: re.Match[str]) -> str:
    high, low, short, long, byte, octal, letter = escape.groups()
    if letter:
        return _LETTERS.get(letter, letter)
    code = int(octal, 8) if octal else int(short or long or byte or "0", 16)
    if high:
        code = 0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF)
    return "\ufffd" if 0xD800 <= code < 0xE000 or code > sys.maxunicode else chr(code)


async def run_search(characters: int, search: Callable[[], T]) -> T:
    """Run the search of a text, in a thread if the text is long."""
    if characters <= INLINE_CHARACTERS:
        return search()
    lane = _lane if characters <= _LONG_CHARACTERS else _long_lane
    return await lane.run(search, JUDGED_TENANT.get())


class RuleFilter(TextFilter):
    """A filter that finds matches of a regular expression, or whole words of a list."""

    def __init__(
        self,
        name: str,
        category: str,
        width: int,
        *,
        pattern: str = "",
        words: Sequence[str] = (),
        ignore_case: bool = False,
    ) -> None:
        """Compile `pattern` and `words`, whose matches have at most `width` characters.

        Raises:
            InputError: RE2 does not support the pattern.
        """
        self.name, self.categories, self.width = name, (category,), width
        self.finding = Finding(name, category)
        self._pattern = _compile(name, pattern, ignore_case) if pattern else None
        # RE2's \b knows ASCII only: it would find the word "stra" in "straße".
        listed = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
        self._words = _compile(name, rf"(?:^|{_NO_WORD})({listed})(?:$|{_NO_WORD})", ignore_case) if listed else None
        self._later_words = _compile(name, rf"{_NO_WORD}({listed})(?:$|{_NO_WORD})", ignore_case) if listed else None

    async def judge(self, text: str) -> Finding | None:
        return self.finding if await run_search(len(text), lambda: self._is_in(text)) else None

    def _is_in(self, text: str) -> bool:
        if self._search(text, 0) is not None:
            return True
        return "\\" in text and self._search(_ESCAPE.sub(_character, text), 0) is not None

    def search(self, text: str, start: int = 0) -> Span | None:
        """Return the first match in `text` from character `start` on, or None.

        A match may be written in escapes such as `\\u0041`. The character before `start` is part of
        the context of the match.
        """
        found = self._search(text, start)
        if "\\" not in text:
            return found
        plain = _without_escapes(text)
        hidden = self._search(plain.text, bisect_left(plain.starts, start))
        if hidden is None:
            return found
        # The character after an incomplete escape is unknown, so the match ends with the text.
        end = len(text) if hidden.end == len(plain.text) else plain.starts[hidden.end]
        span = Span(plain.starts[hidden.start], end)
        return span if found is None else min(found, span)

    def settled(self, text: str) -> int:
        """Return the number of leading characters of `text` at which no incomplete match can begin."""
        if "\\" not in text:
            return len(text) - self.width - 1
        plain = _without_escapes(text)
        return plain.starts[max(0, len(plain.text) - self.width - 1)]

    def _search(self, text: str, start: int) -> Span | None:
        spans = []
        if self._pattern is not None and (found := self._pattern.search(text, start)):
            spans.append(Span(*found.span()))
        # A word's match includes the character before the word, which only a word at the start of a
        # text lacks.
        words = self._later_words if start else self._words
        if words is not None and (found := words.search(text, max(0, start - 1))):
            spans.append(Span(*found.span(1)))
        return min(spans, default=None)


def rule_filter(
    name: str, category: str, patterns: Sequence[str], words: Sequence[str], ignore_case: bool
) -> RuleFilter:
    """Return the filter of regular expressions and whole words.

    Raises:
        InputError: A pattern does not compile, matches an empty text, or has no bounded width.
    """
    widths = [_width(name, pattern) for pattern in patterns]
    listed = [word.strip() for word in words if word.strip()]
    width = max([*widths, *map(len, listed)], default=0)
    if not width:
        raise InputError(
            f"The safety filter {name} has neither patterns nor words; give it `patterns`, `words` or `words_file`."
        )
    if width > MAX_WIDTH:
        raise InputError(
            f"The safety filter {name} may match {width} characters; shorten its patterns or words to at most "
            f"{MAX_WIDTH}."
        )
    joined = "|".join(f"(?:{pattern})" for pattern in patterns)
    return RuleFilter(name, category, width, pattern=joined, words=listed, ignore_case=ignore_case)


def script_filter(name: str, category: str, scripts: Sequence[str]) -> RuleFilter:
    """Return the filter that finds a run of letters of other writing systems than `scripts`.

    Raises:
        InputError: A writing system is unknown, or `scripts` is empty.
    """
    unknown = [script for script in scripts if script.capitalize() not in SCRIPTS]
    if unknown or not scripts:
        known = ", ".join(sorted(SCRIPTS))
        raise InputError(
            f"The safety filter {name} needs `scripts` from this list: {known}. Now it has "
            f"{', '.join(unknown) or 'none'}."
        )
    allowed = "".join(rf"\p{{{script.capitalize()}}}" for script in scripts)
    foreign = rf"[^\P{{L}}{allowed}\p{{Common}}\p{{Inherited}}]"
    # Characters allowed between two letters: marks, spaces and punctuation.
    pattern = rf"(?:{foreign}\P{{L}}{{0,3}}){{{FOREIGN_LETTERS - 1}}}{foreign}"
    return RuleFilter(name, category, 4 * FOREIGN_LETTERS, pattern=pattern)


def _width(name: str, pattern: str) -> int:
    """Return the maximum width of a pattern's match, in characters.

    Raises:
        InputError: The pattern does not compile, matches an empty text, or has no bounded width.
    """
    try:
        narrowest, widest = sre_parser.parse(pattern).getwidth()
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(
            f"The safety filter {name} has a pattern that does not compile: {pattern!r} ({error}); write \\ before a "
            "character that is meant literally."
        ) from None
    if narrowest == 0:
        raise InputError(
            f"The safety filter {name} has a pattern that matches an empty text: {pattern!r}; make it longer."
        )
    if widest > MAX_WIDTH:
        raise InputError(
            f"The safety filter {name} has a pattern that is too wide: {pattern!r} may match more than {MAX_WIDTH} "
            "characters; write {1,N} instead of + and *."
        )
    return int(widest)


# Cached, because compiling is slow and a gateway creates its filters once to check them and once in
# each worker. Workers are forked after the check, so they inherit the cache.
@lru_cache(maxsize=256)
def _compile(name: str, pattern: str, ignore_case: bool):  # type: ignore[no-untyped-def]  # noqa: ANN202 re2 has no types
    try:
        return compile_linear(f"The safety filter {name} needs", pattern, ignore_case)
    except ValueError as error:
        raise InputError(
            f"The safety filter {name} has a pattern that RE2 does not support; rewrite it: {error}."
        ) from None


def compile_linear(need: str, pattern: str, ignore_case: bool):  # type: ignore[no-untyped-def]  # noqa: ANN201 re2 has no types
    """Return a pattern of RE2, which searches in linear time.

    `need` begins the error without RE2, such as "The filter a needs".

    Raises:
        MissingDependencyError: RE2 is not installed.
        ValueError: RE2 does not support the pattern.
    """
    try:
        import re2
    except ImportError as error:
        raise missing_extra(f"{need} RE2, which is not installed", "safety") from error
    options = re2.Options()
    options.log_errors = False
    options.case_sensitive = not ignore_case
    try:
        return re2.compile(pattern, options=options)
    except re2.error as error:
        raise ValueError(str(error)) from None
