"""Errors in EBNF that one pass can find; the engine reports the others."""

from __future__ import annotations

import re

# Nothing is read twice: no alternative can match in two ways, and one that finds no closing mark leaves the rest to
# `open`, which ends the pass.
_PART = re.compile(
    r"""(?P<literal>"[^"\\\n]*(?:\\.[^"\\\n]*)*"|\[[^\]\\\n]*(?:\\.[^\]\\\n]*)*\]|\{[^}]*\})"""
    r"""|(?P<open>["'\[\]{])"""
    r"""|(?P<name>[A-Za-z_][\w.-]*)"""
    r"""|(?P<defines>::=)"""
    r"""|(?P<nest>[()])"""
    r"""|(?P<nothing>\#[^\n]*|\s+)"""
    r"""|(?P<other>.)"""
)


def find_ebnf_error(text: str) -> str | None:
    """Rules that are used must be defined, and brackets and quotes closed."""
    if "\0" in text:
        return "it has the character U+0000"
    used: dict[str, None] = {}
    rules: set[str] = set()
    depth, before = 0, ""
    for match in _PART.finditer(text):
        kind, part = match.lastgroup, match[0]
        if kind == "open":
            return "a text, a character class or a repetition is not closed"
        if kind == "nothing":
            continue
        if kind == "nest":
            depth += 1 if part == "(" else -1
        elif kind == "name":
            used[part] = None
        elif kind == "defines" and before:
            rules.add(before)
        before = part if kind == "name" else ""
    if "root" not in rules:
        return "it has no rule 'root ::= …'"
    missing = min(used.keys() - rules, default=None)
    if missing is not None:
        return f"the rule '{missing}' is used but not defined"
    return None if depth == 0 else "its parentheses do not match"
