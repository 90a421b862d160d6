"""Where commands print their tables."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console(*, stderr: bool = False, **more: Any) -> Console:
    """Return a console of the terminal. With NO_COLOR it has no colours and no other styling."""
    from rich.console import Console

    return Console(stderr=stderr, color_system=None if os.environ.get("NO_COLOR") else "auto", **more)


def table_console(piped: int, *, markup: bool = True) -> Console:
    """Standard output. A pipe has no width, and what is cut there would be noticed by nobody: it is `piped` wide."""
    has_none = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return console(highlight=False, markup=markup, width=piped if has_none else None)
