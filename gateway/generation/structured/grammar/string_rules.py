"""Rules and languages of JSON strings: of any string, or with a length, a pattern or a format."""

from __future__ import annotations

import json

from llmops.gateway.generation.structured.grammar.compile_limits import NotEnforceableError
from llmops.gateway.generation.structured.grammar.grammar_builder import GrammarBuilder, terminal
from llmops.gateway.generation.structured.grammar.regex_parser import Ranges, regex_language
from llmops.gateway.generation.structured.grammar.regular_language import (
    LAST_CODE_POINT,
    SURROGATES,
    RegularLanguage,
    all_of,
    any_of,
    chars,
    concat,
    literal,
    repeat,
    subtract_ranges,
)

_DATE = (
    # Excludes 29 February, which is not in every year.
    "[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
#: Regular expressions of the formats that are enforced.
FORMAT_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,4}W|[0-9]{1,4}D(T[0-9]{1,4}[HMS])?|T[0-9]{1,4}[HMS]|[0-9]{1,4}Y([0-9]{1,2}M)?|[0-9]{1,4}M)",
    "email": rf"[a-zA-Z0-9]([a-zA-Z0-9_+-]*[a-zA-Z0-9])?@{_LABEL}(\.{_LABEL})+",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4}){7}",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": rf"https?://{_HOST}(:[0-9]{{1,4}})?(/[a-zA-Z0-9._~-]*)*(\?[a-zA-Z0-9._~=&-]*)?(#[a-zA-Z0-9._~-]*)?",
}
STRING_CHARACTER = r'[^"\\\x00-\x1f]'

#: Maximum length that is counted together with a pattern. Counting costs one state for each state
#: of the pattern and each length.
_MAX_LENGTH_WITH_PATTERN = 256

#: Length of a block of characters in bounded strings. All blocks share the same rule.
_BLOCK = 64

_SHORT_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 0x22: '"', 0x5C: "\\"}
_NOT_PLAIN: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), SURROGATES]


def json_literal(value: object) -> str:
    """Return a JSON value in its compact form.

    Raises:
        NotEnforceableError: A text has half of a surrogate pair.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if any(0xD800 <= ord(one) <= 0xDFFF for one in text):
        raise NotEnforceableError("a text has half of a surrogate pair; replace it")
    return text


def json_character(ranges: Ranges) -> RegularLanguage:
    """Return the forms of a character in a JSON string: the character, or its short escape.

    Other control characters are left out, unless `ranges` is a single character.
    """
    parts = [chars(subtract_ranges(ranges, _NOT_PLAIN))]
    escapes = "".join(
        escape for code, escape in _SHORT_ESCAPES.items() if any(low <= code <= high for low, high in ranges)
    )
    if escapes:
        parts.append(concat(literal("\\"), any_of(literal(one) for one in escapes)))
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] < 0x20 and not escapes:
        parts.append(literal(f"\\u{ranges[0][0]:04x}"))
    return any_of(parts)


def quoted(content: RegularLanguage) -> RegularLanguage:
    """Return the texts of `content` between quotation marks."""
    return concat(literal('"'), content, literal('"'))


def pattern_string(pattern: str, least: int, most: int | None) -> RegularLanguage:
    """Return the JSON strings of `least` to `most` characters that match a pattern.

    Raises:
        NotEnforceableError: The language is not regular, or the lengths are too large.
    """
    content = regex_language(pattern, json_character)
    if least or most is not None:
        if max(least, most or 0) > _MAX_LENGTH_WITH_PATTERN:
            raise NotEnforceableError(
                f"with a pattern, only lengths of up to {_MAX_LENGTH_WITH_PATTERN} can be enforced"
            )
        content = all_of((content, repeat(json_character([(0, LAST_CODE_POINT)]), least, most)))
    return quoted(content)


def format_string(name: str, least: int, most: int | None) -> RegularLanguage:
    """Return the JSON strings of `least` to `most` characters in a format of `FORMAT_PATTERNS`."""
    return pattern_string(f"^({FORMAT_PATTERNS[name]})$", least, most)


def any_string(rules: GrammarBuilder) -> str:
    """Return the name of the rule for any JSON string."""
    return rules.add(f"{terminal(chr(34))} {string_tail(rules)}")


def string_tail(rules: GrammarBuilder) -> str:
    """Return the rule for characters up to the closing quote.

    The rule is recursive, because xgrammar follows recursion fastest.
    """
    name = "rest_of_string"
    rules.define(name, rf'"\"" | {STRING_CHARACTER} {name} | "\\" ["\\/bfnrt] {name}')
    return name


def bounded_string(rules: GrammarBuilder, least: int, most: int | None) -> str:
    """Return the rule for a JSON string of `least` to `most` characters.

    With an upper bound, escapes are not allowed: they would make the grammar far too slow to
    compile and to follow.
    """
    begin = f'"\\"" {_exactly(rules, least)}'.strip()
    if most is None:
        return rules.add(f"{begin} {string_tail(rules)}")
    return rules.add(f"{begin} {_up_to(rules, most - least)}")


def _exactly(rules: GrammarBuilder, count: int) -> str:
    blocks, rest = divmod(count, _BLOCK)
    parts = [f"{_block(rules)}{{{blocks}}}"] if blocks else []
    return " ".join([*parts, f"{STRING_CHARACTER}{{{rest}}}"] if rest else parts)


def _up_to(rules: GrammarBuilder, count: int) -> str:
    """Return the rule for at most `count` characters and the closing quote.

    Each position costs the engine a pass over the vocabulary, so blocks of positions are shared.
    """
    blocks, rest = divmod(count, _BLOCK)
    following = rules.add(f'{STRING_CHARACTER}{{0,{rest}}} "\\""' if rest else '"\\""')
    begun = rules.add(f'{STRING_CHARACTER}{{0,{_BLOCK - 1}}} "\\""') if blocks else ""
    for _ in range(blocks):
        following = rules.add(f"{begun} | {_block(rules)} {following}")
    return following


def _block(rules: GrammarBuilder) -> str:
    # The last character is a separate rule, because xgrammar would inline a rule without references
    # wherever it is used.
    return rules.add(f"{STRING_CHARACTER}{{{_BLOCK - 1}}} {rules.add(STRING_CHARACTER)}")


def other_property_name(rules: GrammarBuilder, names: list[str]) -> str:
    """Return the rule for a property name that is not among `names`.

    The name has its quotation marks and no escapes.
    """
    plain = [name for name in names if not any(one in '"\\' or ord(one) < 0x20 for one in name)]
    return rules.add(f'"\\"" {_text_not_in(rules, plain)}')


def _text_not_in(rules: GrammarBuilder, names: list[str]) -> str:
    heads = sorted({name[0] for name in names if name})
    choices = [] if "" in names else [r'"\""']
    for head in heads:
        rest = _text_not_in(rules, [name[1:] for name in names if name[:1] == head])
        choices.append(f"{terminal(head)} {rest}")
    # Where a declared name begins beyond ASCII, no other name may: xgrammar cannot exclude some
    # characters beyond ASCII in a class.
    last = LAST_CODE_POINT if all(head.isascii() for head in heads) else 0x7F
    others = chars(subtract_ranges([(0, last)], [*_NOT_PLAIN, *((ord(head), ord(head)) for head in heads)]))
    name = "rest_of_name"
    rules.define(name, rf'"\"" | {STRING_CHARACTER} {name}')
    first = rules.language(others)
    return rules.add(" | ".join([*choices, f"{first} {name}"]))
