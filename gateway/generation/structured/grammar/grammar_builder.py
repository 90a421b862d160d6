"""The rules of one grammar in xgrammar's notation.

Regular languages become deterministic automata, with a rule for each state.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from llmops.gateway.generation.structured.grammar.compile_limits import (
    GrammarTooComplexError,
    NotEnforceableError,
    UnsatisfiableSchemaError,
    spend_steps,
)
from llmops.gateway.generation.structured.grammar.regular_language import (
    EMPTY_SET,
    EMPTY_TEXT,
    LAST_CODE_POINT,
    SURROGATES,
    Ranges,
    RegularLanguage,
    character_classes,
    derivative,
    merge_ranges,
)

#: Name of the rule for white space between tokens of JSON.
SPACE = "space"

#: Body of the rule for white space: at most one space. Some models write white space endlessly. An
#: engine keeps a vocabulary mask for each state, and the whole vocabulary may follow each character
#: of an indentation: with {0,20}, a grammar took ten times the memory.
_SPACE_BODY = '"" | " "'

#: Maximum number of states of one automaton, each of which becomes a rule.
_MAX_STATES = 4000

_BEYOND_ASCII = [(0x80, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST_CODE_POINT)]

#: Maximum length of a grammar in characters. Engines take seconds to compile a longer one.
_MAX_GRAMMAR_LENGTH = 4_000_000

#: Characters of a rule that are written in one step of work.
_CHARACTERS_PER_STEP = 64

Edges = dict[RegularLanguage, dict[Ranges, RegularLanguage]]


class GrammarBuilder:
    """A builder of the rules of one grammar. Equal rules are written once.

    No two alternatives of a rule begin with the same character: xgrammar 0.1.31, which OpenVINO
    GenAI includes, merges states of such rules that are not equal and then allows `178` where 177
    is the maximum (docs/decisions/0009-grammars.md).
    """

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {SPACE: _SPACE_BODY}
        self._names: dict[str, str] = {}
        self._languages: dict[RegularLanguage, str] = {}
        self._size = 0

    def add(self, body: str) -> str:
        """Return the name of the rule with this body. The rule is added if it is new."""
        if body in self._bodies:
            return body
        if body not in self._names:
            name = self.reserve()
            self.define(name, body)
        return self._names[body]

    def reserve(self) -> str:
        """Return a name for a rule that is defined later, which recursion needs."""
        spend_steps(10)
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Write the body of a rule."""
        self._write(name, body)
        self._names.setdefault(body, name)

    def _write(self, name: str, body: str) -> None:
        self._size += len(body)
        spend_steps(len(body) // _CHARACTERS_PER_STEP)
        if self._size > _MAX_GRAMMAR_LENGTH:
            raise GrammarTooComplexError("its grammar would be too large; simplify it")
        self._bodies[name] = body

    def language(self, language: RegularLanguage) -> str:
        """Return the name of the rule for a regular language. The rule is added if it is new.

        Raises:
            UnsatisfiableSchemaError: The language contains no text.
        """
        if language not in self._languages:
            self._languages[language] = self._automaton(language)
        return self._languages[language]

    def text(self, root: str) -> str:
        """Return the whole grammar as text, with `root` as the body of its first rule."""
        lines = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]
        return "\n".join(lines)

    def _automaton(self, start: RegularLanguage) -> str:
        edges = _without_dead_states(self._edges(start))
        if start not in edges:
            raise UnsatisfiableSchemaError("it allows no value; loosen its limits")
        entries = Counter(target for targets in edges.values() for target in targets.values())
        names: dict[RegularLanguage, str] = {start: self.reserve()}
        stack = [start]
        while stack:
            state = stack.pop()
            choices = []
            for ranges, target in edges[state].items():
                run, target = _literal_run(ranges, target, edges, entries)
                if target is not EMPTY_TEXT and target not in names:
                    names[target] = self.reserve()
                    stack.append(target)
                choices.append(run if target is EMPTY_TEXT else f"{run} {names[target]}")
            self._write(names[state], " | ".join(['""', *choices] if state.nullable else choices))
        return names[start]

    def _edges(self, start: RegularLanguage) -> Edges:
        """Return all reachable states, each with its next states by the characters that lead there."""
        edges: Edges = {}
        groups, stack = character_classes(start), [start]
        joined = lru_cache(maxsize=None)(lambda which: merge_ranges(part for at in which for part in groups[at]))
        while stack:
            state = stack.pop()
            if state in edges:
                continue
            if len(edges) >= _MAX_STATES:
                raise NotEnforceableError("its grammar would be too large; simplify it")
            targets: dict[RegularLanguage, tuple[int, ...]] = {}
            for at, group in enumerate(groups):
                target = derivative(state, group[0][0])
                if target is not EMPTY_SET:
                    targets[target] = (*targets.get(target, ()), at)
            edges[state] = {joined(which): target for target, which in targets.items()}
            stack.extend(targets)
        return edges


def _without_dead_states(edges: Edges) -> Edges:
    """Return `edges` without the states from which no text can end."""
    before: dict[RegularLanguage, list[RegularLanguage]] = {}
    for state, targets in edges.items():
        for target in targets.values():
            before.setdefault(target, []).append(state)
    alive, stack = set(), [state for state in edges if state.nullable]
    while stack:
        state = stack.pop()
        if state not in alive:
            alive.add(state)
            stack.extend(before.get(state, ()))
    return {
        state: {ranges: target for ranges, target in targets.items() if target in alive}
        for state, targets in edges.items()
        if state in alive
    }


def _literal_run(
    ranges: Ranges, target: RegularLanguage, edges: Edges, entries: Counter[RegularLanguage]
) -> tuple[str, RegularLanguage]:
    """Return a terminal and the state after the terminal.

    A run of characters without alternatives becomes one literal.

    Args:
        ranges: The characters that lead to `target`.
        target: The state after these characters.
        edges: The next states of each state, by the characters that lead there.
        entries: The number of edges to each state. A run ends before a state with several.
    """
    text = _single(ranges)
    if text is None:
        return _character_class(ranges), target
    while not target.nullable and entries[target] == 1 and len(edges[target]) == 1:
        ((following, further),) = edges[target].items()
        more = _single(following)
        if more is None:
            break
        text, target = text + more, further
    return terminal(text), target


#: Position between a character beyond ASCII and a hexadecimal digit. xgrammar writes such a
#: character as hexadecimal digits and would read a following digit as part of the number, so a
#: literal must be divided here.
_HEX_AFTER_NON_ASCII = re.compile(r"(?<=[^ -~])(?=[0-9a-fA-F])")


def terminal(text: str) -> str:
    """Return the literal for `text`.

    Raises:
        NotEnforceableError: The text has the character U+0000, which ends a grammar for xgrammar.
    """
    if "\0" in text:
        raise NotEnforceableError("a text has the character U+0000; remove it")
    return " ".join(f'"{"".join(map(_escape_character, part))}"' for part in _HEX_AFTER_NON_ASCII.split(text))


def _escape_character(one: str) -> str:
    return "\\" + one if one in '"\\' else f"\\x{ord(one):02x}" if ord(one) < 0x20 else one


def _single(ranges: Ranges) -> str | None:
    return chr(ranges[0][0]) if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else None


@lru_cache(maxsize=256)
def _character_class(ranges: Ranges) -> str:
    """Return the character class of `ranges`.

    xgrammar 0.1.25 supports characters beyond ASCII only in classes that exclude characters, and no
    version supports classes that exclude only some characters beyond ASCII. A class that excludes
    characters also matches bytes that are not UTF-8, but only if a model writes such bytes.
    """
    beyond = [(max(low, 0x80), high) for low, high in ranges if high >= 0x80]
    if beyond != _BEYOND_ASCII:
        return f"[{_in_class(ranges)}]"
    within = [(low, min(high, 0x7F)) for low, high in ranges if low < 0x80]
    ends = [(-1, -1), *within, (0x80, 0x80)]
    return f"[^{_in_class([(before[1] + 1, after[0] - 1) for before, after in pairwise(ends)])}]"


def _in_class(ranges: Iterable[tuple[int, int]]) -> str:
    parts = [part for part in ranges if part[0] <= part[1]]
    ends = [chr(code) for part in parts for code in part]
    # Escape all characters of the class or none: xgrammar may read a letter after an escape as a
    # digit of the escape.
    spelt = str if all(one.isascii() and one.isalnum() for one in ends) else _escaped
    return "".join(spelt(chr(low)) + (f"-{spelt(chr(high))}" if high > low else "") for low, high in parts)


def _escaped(one: str) -> str:
    return f"\\u{ord(one):04x}" if ord(one) < 0x10000 else f"\\U{ord(one):08x}"
