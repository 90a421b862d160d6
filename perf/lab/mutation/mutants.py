"""The faults of one module: cosmic-ray's operators, applied to its source in memory."""

from __future__ import annotations

import ast
import difflib
import itertools
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

# `is` instead of `==`, or anything but `is not` instead of `is`: linters and TypeErrors find those.
# The last two need to be told which variable.
LEFT_OUT = re.compile(r"(?<!Is)_Is(Not)?$|_Is_(?!IsNot)|_IsNot_(?!Is$)|Variable(Replacer|Inserter)$")


@dataclass(frozen=True)
class Mutant:
    """The whole changed source, and the lines that differ."""

    file: str
    source: str
    line: int
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}\n  - {self.was}\n  + {self.now}"


def sample(file: str, source: str, size: int, seed: int) -> list[Mutant]:
    """`size` mutants at different places of the file, one for each; the same ones for the same seed and source."""
    draw = random.Random(f"{seed} {file}")
    places: dict[Any, list[tuple[Any, int]]] = defaultdict(list)
    for place, operator, occurrence in _possible(source):
        places[place].append((operator, occurrence))
    chosen = (draw.choice(places[place]) for place in draw.sample(sorted(places), len(places)))
    return list(itertools.islice(_mutants(file, source, chosen), size))


def every(file: str, source: str) -> list[Mutant]:
    return list(_mutants(file, source, ((operator, occurrence) for _, operator, occurrence in _possible(source))))


def _possible(source: str) -> Iterator[tuple[Any, Any, int]]:
    """Place, operator, and which of the operator's places in the file it is."""
    nodes = list(ast_nodes(get_ast(source)))
    for name in operator_names():
        if LEFT_OUT.search(name):
            continue
        operator = get_operator(name)()
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, place in enumerate(places):
            yield place, operator, occurrence


def _mutants(file: str, source: str, chosen: Iterator[tuple[Any, int]]) -> Iterator[Mutant]:
    seen = {_meaning(source)}
    for operator, occurrence in chosen:
        try:
            changed = mutate_code(source, operator, occurrence)
        except AttributeError:  # cosmic-ray cannot replace an exception with a dot in its name
            continue
        meaning = _meaning(changed)
        if meaning is not None and meaning not in seen:
            seen.add(meaning)
            yield Mutant(file, changed, *_difference(source, changed))


def _meaning(source: str) -> str | None:
    """What of the source does anything when it runs; None where it does not compile."""
    try:
        tree = ast.parse(source)
        compile(tree, "<mutant>", "exec")
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def _difference(source: str, changed: str) -> tuple[int, str, str]:
    before, after = source.splitlines(), changed.splitlines()
    for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            return a + 1, " ".join(map(str.strip, before[a:b])), " ".join(map(str.strip, after[c:d]))
    raise AssertionError("the sources are equal")
