"""Parsers of tool calls: one module per format, with a parser for each family of models.

New modules are discovered automatically.

A parser declares the name of its `family`, the `signs` in a chat template that identify its format,
and a `rank`, because a template may have the signs of several families.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import lru_cache

from llmops.gateway.generation.parsers.tool_parser import ToolParser

#: Rank and sign of templates whose tool calls no parser reads. These signs take precedence over
#: signs of a higher rank.
_UNSUPPORTED_FORMATS = ((1, "<｜DSML｜"),)


def _discover_parsers() -> Iterator[type[ToolParser]]:
    for module in pkgutil.iter_modules(__path__):
        for one in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(one, type) and issubclass(one, ToolParser) and "family" in vars(one):
                yield one


PARSERS: dict[str, type[ToolParser]] = {parser.family: parser for parser in _discover_parsers()}

#: Rank, sign and family of all signs, the most specific first; the family is None if no parser
#: reads the format.
_SIGNS: tuple[tuple[int, str, str | None], ...] = tuple(
    sorted(
        (
            *((parser.rank, sign, family) for family, parser in PARSERS.items() for sign in parser.signs),
            *((rank, sign, None) for rank, sign in _UNSUPPORTED_FORMATS),
        ),
        key=lambda one: one[0],
    )
)


@lru_cache(maxsize=64)
def renders_tools(template: str) -> bool:
    """Return True if the template uses the variable `tools`."""
    return "tools" in template


@lru_cache(maxsize=64)
def detect_family(template: str) -> str | None:
    """Return the name of the parser's family for `template`; None if no parser reads its format.

    A template that does not render tools gets them in Hermes' form (`tool_messages`), so the model
    answers in that form.
    """
    if not renders_tools(template):
        return "hermes"
    return next((family for _, sign, family in _SIGNS if sign in template), None)
