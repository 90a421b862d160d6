"""Checks of EBNF grammars that clients send: errors that one pass can find, and ambiguity.

An engine follows all ways to parse a text at the same time. A grammar of 58 characters, `(([a-z ]*
[a-z ]*)* …)*`, took seconds per token after 60 tokens. Three forms are refused: a repetition whose
body may be empty, a rule that can become itself, and a rule that can become two of itself.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from llmops.gateway.generation.structured.grammar.compile_limits import spend_steps

# Every alternative begins with other characters, so no part of the text is read twice. An
# alternative without its closing mark leaves the rest to `unclosed`, which ends the pass.
_TOKEN = re.compile(
    r"""(?P<empty>""(?!"))"""
    r"""|(?P<terminal>"[^"\\\r\n]*(?:\\.[^"\\\r\n]*)*"|\[[^\]\\\r\n]*(?:\\.[^\]\\\r\n]*)*\])"""
    r"""|(?P<repeat>[*+?]|\{[^}]*\})"""
    r"""|(?P<unclosed>["'\[\]{])"""
    r"""|(?P<name>[A-Za-z_.-][A-Za-z0-9_.-]*)"""
    r"""|(?P<defines>::=)"""
    r"""|(?P<open>\(=?)|(?P<close>\))|(?P<or>\|)"""
    r"""|(?P<nothing>\#[^\r\n]*|[ \t\r\n]+)"""
    r"""|(?P<other>.)"""
)
# Possessive, because backtracking would try every division of a long run of spaces. At most nine
# digits, because xgrammar keeps numbers in 32 bits.
_BOUNDS = re.compile(
    r"\{[ \t\r\n]*+0*+([0-9]{0,9}+)(?<=[0-9])[ \t\r\n]*+"
    r"(?:(,)[ \t\r\n]*+(?:0*+([0-9]{0,9}+)(?<=[0-9])[ \t\r\n]*+)?)?\}"
)
_CHARACTER = re.compile(r"\\(?:x([0-9A-Fa-f]+)|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)")
#: Characters that xgrammar accepts after a backslash, besides hexadecimal numbers, in versions
#: 0.1.25 to 0.2.8, and the characters that they stand for.
_TEXT_ESCAPES = dict(zip("\"'?\\0abefnrtv", "\"'?\\\0\a\b\x1b\f\n\r\t\v", strict=True))
_CLASS_ESCAPES = _TEXT_ESCAPES | {mark: mark for mark in "$()*+-./[]^{|}"}
#: Words of xgrammar's language, which cannot be names of rules.
_WORDS = frozenset({"true", "false", "TagDispatch"})
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}

#: Maximum nesting of parentheses. xgrammar parses each level on the stack, and 25,000 levels
#: overflow the stack, which ends the engine's process.
_MAX_DEPTH = 256
#: Maximum sum of the weights of rules, groups and repetitions. xgrammar 0.1.25 makes a rule of each
#: of them, in quadratic time: 2,048 take up to 0.7 s, 10,000 take half a minute.
_MAX_PARTS = 2048
_WEIGHTS = {"defines": 1, "open": 2, "repeat": 1}
#: Weight of a repetition with numbers, which xgrammar writes out four times.
_NUMBER_WEIGHT = 4

#: Symbol of all terminals, which no rule can have as its name.
_TERMINAL = "'"


class _Token(NamedTuple):
    """A token of EBNF.

    Attributes:
        kind: The name of the token's group in `_TOKEN`.
        part: The text of the token.
        begins_line: True if only white space precedes the token in its line.
    """

    kind: str
    part: str
    begins_line: bool


#: Stand-in for the token before the first and after the last token.
_END = _Token("", "", True)


class _RepeatedSymbol(NamedTuple):
    """A rule or a terminal in a sequence, with its repetitions.

    Attributes:
        name: The name of the rule, or the symbol of all terminals.
        least: The minimum number of repetitions.
        most: The maximum number of repetitions; None without a maximum.
    """

    name: str
    least: int = 1
    most: int | None = 1


_Sequence = list[_RepeatedSymbol]
#: Alternatives of each rule. A group in parentheses counts as a rule with a generated name such as
#: `(3`.
_Rules = dict[str, list[_Sequence]]


def find_ebnf_error(text: str) -> str | None:
    """Return the first error that a single pass over the grammar finds, or None.

    xgrammar rejects each of these errors, too. NVIDIA's backend parses a grammar within an engine
    step, and an error in a step ends all requests.
    """
    if "\0" in text:
        return "it has the character U+0000"
    used: set[str] = set()
    rules: set[str] = set()
    depth, parts, last_name = 0, 0, ""
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "unclosed":
            return "a string, a character class or a repetition is not closed"
        if kind == "nothing":
            continue
        parts += _NUMBER_WEIGHT if match[0].startswith("{") else _WEIGHTS.get(kind or "", 0)
        if parts > _MAX_PARTS:
            return (
                f"it has more than {_MAX_PARTS:,} rules, groups and repetitions (groups count twice, and repetitions "
                "with numbers count four times)"
            )
        depth += (kind == "open") - (kind == "close")
        if depth > _MAX_DEPTH:
            return f"its parentheses are nested deeper than {_MAX_DEPTH} levels"
        if kind == "name":
            used.add(match[0])
        elif kind == "defines" and last_name:
            rules.add(last_name)
        last_name = match[0] if kind == "name" else ""
    if "root" not in rules:
        return "it has no rule 'root ::= …'"
    missing = min(used - rules, default=None)
    if missing is not None:
        return f"the rule '{missing}' is used but not defined"
    return _find_misplaced(text)


def _find_misplaced(text: str) -> str | None:
    """Return the first error of a part at a wrong place, or None.

    The rules are those of xgrammar 0.1.25 (cpp/grammar_parser.cc).
    """
    tokens, begins_line = [_END], True
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "nothing":
            begins_line = begins_line or "\n" in match[0] or "\r" in match[0]
        else:
            tokens.append(_Token(match.lastgroup or "", match[0], begins_line))
            begins_line = False
    rules: set[str] = set()
    depth, in_lookahead, before = 0, False, ""
    following_tokens = [*tokens[1:], _END, _END]
    for token, following, last in zip(tokens, following_tokens, following_tokens[1:], strict=False):
        (kind, part, _), after = token, following.kind
        ends_rule = after == "" or (after, last.kind) == ("name", "defines")
        problem = _find_wrong_name(token, after, ends_rule, rules) or _find_wrong_part(token, after, ends_rule)
        if problem is not None:
            return problem
        # Check parentheses and lookaheads: a lookahead is one sequence at the end of a rule.
        is_misplaced = part == "(=" and (depth > 0 or before in ("defines", "or"))
        in_lookahead = in_lookahead or part == "(="
        depth += (kind == "open") - (kind == "close")
        if depth < 0 or (depth > 0 and ends_rule):
            return "its parentheses do not match"
        is_empty = kind == "empty" or (kind, after) == ("open", "close") or not part.strip("{ 0,}\t\r\n")
        if is_misplaced or (in_lookahead and (kind == "or" or is_empty or not (depth or ends_rule))):
            return "a lookahead (= …) must be one sequence at the end of a rule"
        in_lookahead, before = in_lookahead and depth > 0, kind
    return None


def _find_wrong_name(token: _Token, following: str, ends_rule: bool, rules: set[str]) -> str | None:
    """Return the error in the name of a rule or next to the name, or None.

    Args:
        token: The token to check.
        following: The kind of the next token.
        ends_rule: True if a new rule or the end of the grammar follows.
        rules: The names of the rules so far. A new name is added.
    """
    kind, part, begins_line = token
    if kind == "other":
        return f"it has {part!r} outside of a string"
    if not kind and not ends_rule:
        return "it does not begin with a rule"
    if kind == "name" and part in _WORDS:
        return f"'{part}' cannot be the name of a rule"
    if following != "defines":
        return None
    if kind != "name":
        return "a '::=' does not follow the name of a rule"
    if part in rules:
        return f"the rule '{part}' is defined twice"
    if not begins_line:
        return f"the rule '{part}' does not begin a line"
    rules.add(part)
    return None


def _find_wrong_part(token: _Token, following: str, ends_rule: bool) -> str | None:
    """Return the error in an alternative, a repetition or a terminal, or None.

    Args:
        token: The token to check.
        following: The kind of the next token.
        ends_rule: True if a new rule or the end of the grammar follows.
    """
    kind, part, _ = token
    ends_alternative = ends_rule or following in ("or", "close")
    if (kind in ("defines", "or") and ends_alternative) or (kind, following) == ("open", "or"):
        return 'an alternative is empty: write "" for the empty string'
    if kind in ("defines", "or", "open") and following == "repeat":
        return "a repetition has nothing before it"
    if kind == following == "repeat":
        return "a repetition follows another, which engines read in different ways: use parentheses"
    if kind == "repeat" and part.startswith("{") and not _is_range(part):
        return f"{part[:20]} is not a number of repetitions"
    return _find_character_error(part) if kind == "terminal" else None


def _find_character_error(terminal: str) -> str | None:
    """Return the error in an escape or in a range of a character class, or None."""
    if terminal == "[]":
        # An empty class with a repetition ends the process of xgrammar 0.1.25.
        return "a character class is empty"
    is_class = terminal.startswith("[")
    escapes = _CLASS_ESCAPES if is_class else _TEXT_ESCAPES
    for match in _CHARACTER.finditer(terminal):
        if match[4] is not None and match[4] not in escapes:
            return f"a backslash before {match[4]!r} has no meaning"
    codes, dashes = _codes(terminal)
    if max(codes, default=0) > sys.maxunicode:
        return f"{terminal[:20]} has a number that is not the code of a character"
    at = 0
    while is_class and at < len(codes):
        if at + 1 in dashes and at + 2 < len(codes):
            if codes[at] > codes[at + 2]:
                return f"the character class {terminal[:20]} has a range whose end is before its beginning"
            at += 2
        if terminal.startswith("[^") and codes[at] % 0x100 == 0x80:
            # xgrammar 0.1.25 keeps one byte of the excluded character, and fails on this character
            # when it compiles the grammar.
            return f"the character class {terminal[:20]} cannot exclude U+{codes[at]:04X} in TensorRT-LLM 1.2.1"
        at += 1
    return None


def _codes(terminal: str) -> tuple[list[int], set[int]]:
    """Return the code points of a text or class, and the positions of its unescaped dashes."""
    codes: list[int] = []
    dashes: set[int] = set()
    for match in _CHARACTER.finditer(terminal, 2 if terminal.startswith("[^") else 1, len(terminal) - 1):
        if match[5] == "-":
            dashes.add(len(codes))
        number = match[1] or match[2] or match[3]
        codes.append(int(number, 16) if number else ord(_CLASS_ESCAPES[match[4]] if match[4] else match[5]))
    return codes, dashes


def _is_range(part: str) -> bool:
    bounds = _BOUNDS.fullmatch(part)
    if bounds is None or not bounds[2] or bounds[3] is None:
        return bounds is not None
    return int(bounds[1] or 0) <= int(bounds[3] or 0)


def isolate_classes(text: str) -> str:
    """Return a valid grammar in which each character class beyond ASCII has a rule of its own.

    In a rule that also has a number of repetitions, such a class ends the process of xgrammar
    0.1.25 (TensorRT-LLM 1.2.0). xgrammar inlines a rule that refers to no other rule where a
    sequence begins with it, so each class gets two rules.
    """
    prefix, names = "beyond-ascii", dict[str, str]()
    while prefix in text:
        prefix += "-"

    def isolate(match: re.Match[str]) -> str:
        part = match[0]
        if match.lastgroup != "terminal" or part[0] != "[" or max(_codes(part)[0], default=0) < 0x80:
            return part
        return f" {names.setdefault(part, f'{prefix}{len(names)}')} "

    isolated = _TOKEN.sub(isolate, text) if "{" in text else text
    return isolated + "".join(f"\n{name} ::= {name}-\n{name}- ::= {part}" for part, name in names.items())


def find_ambiguity(text: str) -> str | None:
    """Return the reason why tokens of a grammar would take ever more time, or None.

    Args:
        text: A grammar in EBNF without errors that `find_ebnf_error` finds.

    Raises:
        GrammarTooComplexError: The check takes more work than the surrounding `step_budget` allows.
    """
    rules = _parse(text)
    nullable = _nullable_rules(rules)
    for name, alternatives in rules.items():
        for item in (item for alternative in alternatives for item in alternative):
            if item.name in nullable and (item.most is None or item.most > 1):
                return f"{_position(name)} repeats something that may be empty, so a text can be parsed in endless ways"
    alone = {name: [one for sequence in rules[name] for one in _unit_rules(sequence, nullable)] for name in rules}
    for name, members in _components(alone).items():
        if len(members) > 1 or name in alone[name]:
            return f"{_position(name)} can become itself, so a text can be parsed in endless ways"
    pairs = {name: [one for sequence in rules[name] for one in _adjacent_rules(sequence, nullable)] for name in rules}
    components = _components(pairs)
    for name, alternatives in rules.items():
        for alternative in alternatives:
            if sum(one in components[name] for one in _adjacent_rules(alternative, nullable)) > 1:
                return (
                    f"{_position(name)} can become two of itself, so the ways to parse a text multiply with its length"
                )
    return None


def _parse(text: str) -> _Rules:
    rules: _Rules = {}
    # Rule or group of each open parenthesis, the innermost last.
    stack: list[str] = []
    tokens = [(match.lastgroup, match[0]) for match in _TOKEN.finditer(text) if match.lastgroup != "nothing"]
    for (kind, part), (following, _) in zip(tokens, [*tokens[1:], ("", "")], strict=True):
        spend_steps()
        if kind == "name" and following == "defines":
            rules.setdefault(part, []).append([])
            stack = [part]
        elif not stack:
            continue
        elif kind == "open":
            name = _group_name(rules)
            # A lookahead, which begins with `(=`, consumes no characters.
            rules[name] = [[], []] if part == "(=" else [[]]
            rules[stack[-1]][-1].append(_RepeatedSymbol(name))
            stack.append(name)
        elif kind == "close":
            if len(stack) > 1:
                stack.pop()
        elif kind == "or":
            rules[stack[-1]].append([])
        elif kind == "repeat":
            _repeat_last(rules, rules[stack[-1]][-1], part)
        elif kind in ("terminal", "name"):
            rules[stack[-1]][-1].append(_RepeatedSymbol(part if kind == "name" else _TERMINAL))
    return rules


def _group_name(rules: _Rules) -> str:
    return f"({len(rules)}"


def _repeat_last(rules: _Rules, sequence: _Sequence, mark: str) -> None:
    """Apply the repetition `mark`, such as `*` or `{2,5}`, to the last item of `sequence`.

    An item that has a repetition already is first replaced by a group, which is added to `rules`.
    """
    if not sequence:
        return
    bounds = _BOUNDS.fullmatch(mark)
    least, most = _REPEATS.get(mark, (1, 1))
    if bounds:
        least = int(bounds[1] or 0)
        most = least if not bounds[2] else None if bounds[3] is None else int(bounds[3] or 0)
    item = sequence[-1]
    if item != _RepeatedSymbol(item.name):
        name = _group_name(rules)
        rules[name] = [[item]]
        item = _RepeatedSymbol(name)
    sequence[-1] = _RepeatedSymbol(item.name, least, most)


def _nullable_rules(rules: _Rules) -> set[str]:
    """Return the names of the rules that allow the empty text."""
    missing: dict[tuple[str, int], int] = {}
    users: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, alternatives in rules.items():
        for at, sequence in enumerate(alternatives):
            needed = [item.name for item in sequence if item.least > 0]
            missing[name, at] = len(needed)
            for one in needed:
                users[one].append((name, at))
    found: set[str] = set()
    work = [name for (name, _), count in missing.items() if count == 0]
    while work:
        name = work.pop()
        if name in found:
            continue
        found.add(name)
        for place in users[name]:
            spend_steps()
            missing[place] -= 1
            if missing[place] == 0:
                work.append(place[0])
    return found


def _unit_rules(sequence: _Sequence, nullable: set[str]) -> Iterator[str]:
    """Yield the rules that can make up a whole sequence, because its other items may be empty."""
    needed = [item for item in sequence if item.least > 0 and item.name not in nullable]
    if not needed:
        yield from (item.name for item in sequence if item.name != _TERMINAL)
    elif len(needed) == 1 and needed[0].least == 1 and needed[0].name != _TERMINAL:
        yield needed[0].name


def _adjacent_rules(sequence: _Sequence, nullable: set[str]) -> list[str]:
    """Return the rules of a sequence that can be adjacent, without a character between them.

    A repeated rule is returned twice, because it can be adjacent to itself.
    """
    needed = [item for item in sequence if item.least > 0 and item.name not in nullable]
    if len(needed) > 2 or any(item.name == _TERMINAL for item in needed):
        return []
    items = needed if len(needed) == 2 else [item for item in sequence if item.name != _TERMINAL]
    return [item.name for item in items for _ in range(1 if item.most == 1 else 2)]


def _components(graph: dict[str, list[str]]) -> dict[str, set[str]]:
    """Return the strongly connected component of each node, found with Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    found: dict[str, set[str]] = {}
    open_nodes: list[str] = []
    for root in graph:
        if root in order:
            continue
        work = [(root, iter(graph[root]))]
        order[root] = low[root] = len(order)
        open_nodes.append(root)
        while work:
            spend_steps()
            node, targets = work[-1]
            target = next(targets, None)
            if target is None:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == order[node]:
                    members = {open_nodes.pop()}
                    while node not in members:
                        members.add(open_nodes.pop())
                    found.update(dict.fromkeys(members, members))
            elif target not in order and target in graph:
                order[target] = low[target] = len(order)
                open_nodes.append(target)
                work.append((target, iter(graph[target])))
            elif target in order and target not in found:
                low[node] = min(low[node], order[target])
    return found


def _position(name: str) -> str:
    return "a group in parentheses" if name.startswith("(") else f"the rule '{name}'"
