"""One module per format in which models write their calls, with a parser for each family; new modules are discovered.

A parser names its `family`, the `signs` by which a chat template tells that its calls have this form, and its `rank`
among those whose signs a template may have as well.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from llmops.gateway.generation.parsers.tool_parser import ToolParser

# a template with one of these writes calls in a form that no parser here reads, whatever else it has; asked by rank
_UNSUPPORTED_FORMATS = ((1, "<｜DSML｜"),)


def _discover_parsers() -> Iterator[type[ToolParser]]:
    for module in pkgutil.iter_modules(__path__):
        for one in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(one, type) and issubclass(one, ToolParser) and "family" in vars(one):
                yield one


PARSERS: dict[str, type[ToolParser]] = {parser.family: parser for parser in _discover_parsers()}

# what a template says about the form of calls, most telling first
_SIGNS: tuple[tuple[int, str, str | None], ...] = tuple(
    sorted(
        (
            *((parser.rank, sign, family) for family, parser in PARSERS.items() for sign in parser.signs),
            *((rank, sign, None) for rank, sign in _UNSUPPORTED_FORMATS),
        ),
        key=lambda one: one[0],
    )
)


def renders_tools(template: str) -> bool:
    """Whether the template renders `tools` at all."""
    return "tools" in template


def detect_family(template: str) -> str | None:
    """The name of the parser for `template`; None if none of them reads its format.

    A template that knows no tools is prompted in Hermes' form (`prompting`), so it is answered in it.
    """
    if not renders_tools(template):
        return "hermes"
    return next((family for _, sign, family in _SIGNS if sign in template), None)
