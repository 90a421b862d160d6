"""The names on the pages for contributors are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w./-]+\.py)\)")
PAGES = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]


def names_in(path: Path) -> set[str]:
    """Return the top-level names of a module, and `Class.method` for methods."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {node.name} | {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {one.id for one in targets if isinstance(one, ast.Name)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_thing_is_where_the_page_says(page):
    links = LINK.findall(page.read_text())
    assert len(links) >= 10
    for name, target in links:
        module = (page.parent / target).resolve()
        assert module.is_file(), f"{page.name}: {target}"
        assert name in names_in(module), f"{page.name}: {name} is not in {target}"
